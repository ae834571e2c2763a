"""The shim: one small process above each local node, so that the node and its end outlive the master.

The shim starts the node's command in a session of its own, waits for it, kills the processes that the node leaves
behind, and records how it ended. It is the parent of every orphan below it (child subreaper): when it has no children
left, the node is gone, including processes that made sessions of their own. If the shim itself is killed, the kernel
kills the node's main process (parent-death signal), and the platform kills the rest.

Every recovery waits for it, so it imports little, is started with `-I -S` and as a module (which saves compiling it),
and runs without the rest of resile. The platform starts it with every signal blocked: no signal is lost, and only
SIGKILL ends it.

Arguments: node directory, working directory, memory cgroup (or an empty string), then the command. File descriptor 3
is a pipe to the platform: `running PID`, then `ended JSON`, one line each. SIGTERM means: read `stop.json` and
end the node.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36

STATUS_FD = 3
DEFAULT_GRACE = 30.0
"""Seconds between SIGTERM and SIGKILL if `stop.json` cannot be read: the default of Kubernetes."""
UNKILLABLE_AFTER = 10.0
"""Seconds after which a process that SIGKILL has not ended (it hangs in the kernel) is reported and left alone."""
SWEEP_AFTER = 0.5
"""For so many seconds `kill_rest` kills only the shim's children, then all its descendants."""
RESERVED = 1024
"""Bytes reserved on disk for `exit.json` when the node starts, so that it can be written even if the disk is full."""

NOT_FOUND = 127
NOT_EXECUTABLE = 126


class Node:
    """The node's main process, and its wait status once it was reaped."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.status: int | None = None

    def reap(self) -> bool:
        """Reap every child that has ended, without waiting; False if no child is left."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return True
                if pid == self.pid:
                    self.status = status
        except ChildProcessError:
            return False

    @property
    def fell_to_sigterm(self) -> bool:
        """True if SIGTERM killed the main process.

        If the main process was a shell, the program that the shell started may live on and save a checkpoint.
        """
        return self.status is not None and os.WIFSIGNALED(self.status) and os.WTERMSIG(self.status) == signal.SIGTERM


def prctl(option: int, value: int | bytes) -> None:
    """Set an attribute of this process; an option that the kernel lacks is ignored."""
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def start(command: list[str], workdir: str, cgroup: str) -> tuple[Node | None, int, str]:
    """Start the command in `workdir`, and in the cgroup unless `cgroup` is empty.

    Returns the node, 0 and an empty text. If the command cannot be started, returns None, an exit code, and one
    sentence that says why.
    """
    shim = os.getpid()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        step = "fork"
        try:
            os.setsid()
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != shim:
                os._exit(128 + signal.SIGKILL)
            if cgroup:
                step = "cgroup"
                with open(f"{cgroup}/cgroup.procs", "w") as procs:
                    procs.write("0")
            step = "workdir"
            os.chdir(workdir)
            for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            step = "exec"
            os.execvp(command[0], command)
        except OSError as error:
            os.write(writer, f"{step} {error.errno or 0}".encode())
        finally:
            os._exit(NOT_FOUND)
    os.close(writer)
    answer = os.read(reader, 100).decode()  # the end of the pipe is the exec
    os.close(reader)
    if not answer:
        return Node(pid), 0, ""
    os.waitpid(pid, 0)
    step, error_number = answer.split()
    why = os.strerror(int(error_number))
    if step == "workdir":
        return None, NOT_EXECUTABLE, f"cannot enter the working directory {workdir}: {why}"
    if step == "cgroup":
        return None, NOT_EXECUTABLE, f"cannot join the memory cgroup {cgroup}: {why}"
    if why == os.strerror(2):
        return None, NOT_FOUND, f"{command[0]}: command not found"
    return None, NOT_EXECUTABLE, f"{command[0]}: cannot be executed: {why}"


def stat_of(pid: str) -> list[str]:
    """The fields of /proc/PID/stat from the third (state) on; empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 if there is no such process."""
    fields = stat_of(str(pid))
    return int(fields[19]) if fields else 0


def children() -> list[int]:
    """The pids of the shim's children. Reads the kernel's `children` file or, if there is none, all of /proc."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        me = str(os.getpid())
        return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and stat_of(pid)[1:2] == [me]]


def descendants(root: int) -> dict[int, list[str]]:
    """All descendants of a process by pid, parents first, with the fields of `stat_of`.

    Reads all of /proc, 20 µs per process.
    """
    stats = {int(pid): stat_of(pid) for pid in os.listdir("/proc") if pid.isdigit()}
    below: dict[int, list[int]] = {}
    for pid, fields in stats.items():
        if fields:
            below.setdefault(int(fields[1]), []).append(pid)
    found: dict[int, list[str]] = {}
    todo = [root]
    while todo:
        for pid in below.get(todo.pop(), []):
            found[pid] = stats[pid]
            todo.append(pid)
    return found


def group_lives(group: int) -> bool:
    return any(fields[0] != "Z" and fields[2] == str(group) for fields in descendants(os.getpid()).values())


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def kill_rest(node: Node) -> int:
    """Kill all processes of the node and wait until they are gone. Returns how many are left after a time-out, else 0.

    When a child dies, its own children become children of the shim. So all processes are reached, level by level.
    """
    if node.status is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(node.pid, signal.SIGKILL)
    began = time.monotonic()
    while node.reap():
        waited = time.monotonic() - began
        if waited > UNKILLABLE_AFTER:
            return len(descendants(os.getpid()))
        for pid in children() if waited < SWEEP_AFTER else descendants(os.getpid()):
            kill(pid)
        signal.sigtimedwait([signal.SIGCHLD], SWEEP_AFTER)
    return 0


def read_grace(directory: str) -> float:
    """The seconds between SIGTERM and SIGKILL that `stop.json` asks for; `DEFAULT_GRACE` if the file cannot be read."""
    import json

    try:
        with open(f"{directory}/stop.json", encoding="utf-8") as file:
            return max(0.0, float(json.load(file)["grace"]))
    except (OSError, ValueError, KeyError, TypeError):
        return DEFAULT_GRACE


def wait(node: Node, directory: str) -> None:
    """Wait until the main process has ended, or until the shim got SIGTERM and the grace is over.

    SIGTERM is passed on to the group of the main process. If SIGTERM kills the main process, the wait goes on until the
    whole group has ended or the grace is over. The reason: the main process was most often a shell, and the program
    that the shell started is still saving. A further SIGTERM can only shorten the grace.
    """
    deadline: float | None = None
    while True:
        if deadline is None:
            info = signal.sigwaitinfo((signal.SIGCHLD, signal.SIGTERM))
        else:
            left = max(0.0, deadline - time.monotonic())
            timely = signal.sigtimedwait((signal.SIGCHLD, signal.SIGTERM), left)
            if timely is None:
                return
            info = timely
        if info.si_signo == signal.SIGTERM:
            grace = read_grace(directory)
            if deadline is None and grace > 0 and node.status is None:
                os.killpg(node.pid, signal.SIGTERM)
            asked = time.monotonic() + grace
            deadline = asked if deadline is None else min(deadline, asked)
        node.reap()
        if node.status is not None and not (deadline and node.fell_to_sigterm and group_lives(node.pid)):
            return


def oom_kills(cgroup: str) -> int:
    """How many processes the kernel killed for exceeding the memory limit of this cgroup (version 1 or 2)."""
    for name in ("memory.oom_control", "memory.events"):
        try:
            with open(f"{cgroup}/{name}") as file:
                for line in file:
                    if line.startswith("oom_kill "):
                        return int(line.split()[1])
        except OSError:
            continue
    return 0


def remove_cgroup(cgroup: str) -> None:
    """Remove the node's cgroup, then the cgroups of the job and of resile above it if they are empty."""
    for _ in range(3):
        try:
            os.rmdir(cgroup)
        except OSError:
            return
        cgroup = os.path.dirname(cgroup)


def tell(line: str) -> None:
    """Send one line to the platform. Ignore an error, because the next master's platform reads the node's files."""
    with contextlib.suppress(OSError):
        os.write(STATUS_FD, line.encode() + b"\n")


def record_start(directory: str, node: Node, started_at: float) -> None:
    """Add the pids and start times of the shim and of the main process to `node.json`. Reserve space for `exit.json`.

    If a file cannot be written, for example on a full disk, the node runs anyway.
    """
    import json

    try:
        with open(f"{directory}/exit.json.tmp", "wb") as file:
            file.write(b" " * RESERVED)
        with open(f"{directory}/node.json", encoding="utf-8") as record:
            fields = json.load(record)
        with open("/proc/sys/kernel/random/boot_id") as boot:
            fields["boot"] = boot.read().strip()
        fields["shim_pid"], fields["shim_start"] = os.getpid(), start_time(os.getpid())
        fields["pid"], fields["pid_start"] = node.pid, start_time(node.pid)
        fields["started_at"] = started_at
        with open(f"{directory}/node.json.tmp", "w", encoding="utf-8") as record:
            json.dump(fields, record)
        os.rename(f"{directory}/node.json.tmp", f"{directory}/node.json")
    except (OSError, ValueError) as error:
        print(f"resile: cannot record the start of the node: {error}", file=sys.stderr, flush=True)


def record_end(directory: str, end: dict[str, object]) -> None:
    """Write `end` to `exit.json` and send it to the platform.

    Readers see all of the file or nothing. The file is synced to disk after the message is sent, because a disk that is
    busy with a checkpoint must not delay a recovery. A power failure before the sync ends the node anyway.
    """
    import json

    text = json.dumps(end)
    try:
        file = os.open(f"{directory}/exit.json.tmp", os.O_WRONLY | os.O_CREAT, 0o644)
        os.write(file, text.encode().ljust(RESERVED))
        os.rename(f"{directory}/exit.json.tmp", f"{directory}/exit.json")
        tell(f"ended {text}")
        os.fsync(file)
        folder = os.open(directory, os.O_RDONLY)
        os.fsync(folder)
    except OSError as error:
        tell(f"ended {text}")
        print(f"resile: cannot record the end of the node: {error}", file=sys.stderr, flush=True)


def main() -> None:
    directory, workdir, cgroup, *command = sys.argv[1:]
    os.set_inheritable(STATUS_FD, False)
    os.closerange(STATUS_FD + 1, os.sysconf("SC_OPEN_MAX"))  # what the master's parent let everybody inherit
    os.chdir("/")
    prctl(PR_SET_NAME, b"resile-shim")
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    started_at = time.time()
    survivors, exit_code, signal_number = 0, 0, 0
    node, exit_code, error = start(command, workdir, cgroup)
    if node is not None:
        tell(f"running {node.pid}")
        record_start(directory, node, started_at)
        wait(node, directory)
        survivors = kill_rest(node)
        status = signal.SIGKILL if node.status is None else node.status
        exit_code = os.waitstatus_to_exitcode(status)
        if exit_code < 0:
            exit_code, signal_number = 128 - exit_code, -exit_code
    end: dict[str, object] = {
        "exit_code": exit_code,
        "signal": signal_number,
        "oom": bool(cgroup) and oom_kills(cgroup) > 0,
        "started_at": started_at if node else 0.0,
        "ended_at": time.time(),
        "error": error,
        "survivors": survivors,
    }
    record_end(directory, end)
    if cgroup:
        remove_cgroup(cgroup)
    os._exit(0)
