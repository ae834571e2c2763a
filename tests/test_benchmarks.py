"""The cheap benchmarks in their shortest forms: figures come out and make sense. Whether they pass: `make bench`."""

from __future__ import annotations

import json
import re
import resource
import shutil
from pathlib import Path

import msgspec
import pytest
from benchmarks import __main__ as bench
from benchmarks import (
    checkpoint,
    elastic,
    failure_detection,
    help_time,
    page,
    recovery_timeline,
    rendezvous,
    step_log,
    table,
)
from benchmarks.harness import GaveUp, Row, Workplace, percentile, wait_for
from benchmarks.kube.time_to_first_step import parts_between


def test_a_row_passes_when_its_figure_is_not_above_its_bar() -> None:
    assert Row(measure="m", value=2.0, bar=2.0).passed is True
    assert Row(measure="m", value=2.1, bar=2.0).passed is False
    assert Row(measure="m", value=2.1).passed is None


def test_the_ratio_says_how_many_times_our_figure_the_peers_is() -> None:
    assert Row(measure="m", value=2.0, peer=5.0).ratio == 2.5
    assert Row(measure="m", value=2.0).ratio is None
    assert Row(measure="m", value=0.0, peer=5.0).ratio is None


def test_percentile_is_a_value_that_was_measured() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 1.0)) == (50.0, 99.0, 100.0)
    assert percentile([7.0], 0.99) == 7.0


def test_the_table_is_aligned_and_has_a_verdict_for_every_bar() -> None:
    rows = [
        Row(measure="fast enough", value=0.123, unit="s", bar=2.0, peer=1.23, note="of 3"),
        Row(measure="too slow", value=12.3, unit="ms", bar=5.0),
        Row(measure="no bar", value=4.5, unit="s"),
    ]
    lines = table.render(rows).splitlines()
    assert [line.split()[-1] for line in lines[2:4]] == ["pass", "MISSED"]
    assert "10.0x" in lines[2]
    assert lines[-1].strip() == "fast enough: of 3"
    right_edge = lines[0].index("resile") + len("resile")
    for line, last in zip(lines[2:5], ("s", "ms", "s"), strict=True):
        assert line[:right_edge].endswith(last)


def test_the_table_names_the_peer_and_shows_medians_where_there_are_any() -> None:
    row = Row(measure="m", value=2.0, median=1.5, peer=4.0, unit="s")
    assert table.render([row], "Other").split()[:5] == ["measure", "bar", "resile", "median", "Other"]
    assert "1.50 s" in table.render([row])
    assert "median" not in table.render([Row(measure="m", value=2.0)])


def test_every_further_peer_has_a_column() -> None:
    rows = [Row(measure="m", value=2.0, others={"Another": 4.5}, unit="s"), Row(measure="n", value=1.0)]
    lines = table.render(rows).splitlines()
    assert lines[0].split() == ["measure", "bar", "resile", "torchrun", "Another", "ratio", "verdict"]
    assert "4.50 s" in lines[2]


def test_the_parts_of_a_start_are_the_times_between_moments_and_never_negative() -> None:
    parts = parts_between([99.75, 100.0, 100.5, 101.0, 102.0, 101.5, 103.0, 105.0, 105.125, 105.125, 105.25])
    assert (parts.kubectl, parts.operator, parts.master_pod, parts.master, parts.worker_pods) == (
        0.25,
        0.5,
        0.5,
        1.0,
        0.0,
    )
    assert (parts.total, parts.ours) == (5.5, 3.0)


def test_waiting_in_vain_ends_with_a_sentence() -> None:
    with pytest.raises(GaveUp, match=r"nothing did not happen within 0\.01 s"):
        wait_for("nothing", lambda: None, 0.01)


def test_leaving_a_workplace_ends_what_was_started_in_it_and_removes_it() -> None:
    with Workplace() as place:
        process = place.start(["sleep", "60"])
    assert process.returncode is not None
    assert not place.path.exists()


def test_help_comes_quickly_and_nothing_heavy_is_imported() -> None:
    time_of_help, heavy = help_time.run(quick=True)
    assert 0.0 < time_of_help.value < 5.0
    assert time_of_help.peer is not None
    assert heavy.passed, heavy.note


def test_checkpoints_are_measured_and_restored() -> None:
    rows = checkpoint.run(quick=True, mib=16, peers=False)
    assert [row.unit for row in rows] == ["memcpy", "memcpy", "ms", "s", "states", "states"]
    assert all(row.value > 0.0 for row in rows)
    assert rows[-2].value < 2.2
    assert 3.9 < rows[-1].value < 4.4, "two of its own, two of the other node's"


def test_a_step_is_compared_with_one_of_ddp() -> None:
    row = elastic.step_cost("tiny", pairs=2)
    assert row.unit == "%"
    assert "both in the same two processes" in row.note


def test_how_far_a_median_may_be_off_follows_from_how_many_values_there_are_and_how_far_apart() -> None:
    assert elastic.median_within([3.0, 1.0, 2.0]) == (1.0, 3.0), "so few say nothing but that"
    assert elastic.median_within(list(range(100))) == (40, 59)
    least, most = elastic.median_within([each * 2.0 for each in range(100)])
    assert most - least == 38.0


def step(at: float, round_: int, world: int, rank: int) -> str:
    return f"{at} {round_} {world} {rank} 0\n"


def test_the_pause_of_a_resize_is_the_longest_between_the_steps_of_two_rounds() -> None:
    with Workplace() as place:
        for rank, late in ((0, 0.0), (1, 0.5)):
            steps = [step(1.0, 1, 2, rank), step(2.0, 1, 2, rank), step(2.25 + late, 2, 3, rank)]
            (place.path / f"steps.{10 + rank}").write_text("".join(steps))
        assert step_log.longest_pause(place, {10, 11}, before=1) == 0.75
        assert step_log.next_step(place, {10, 11}, after=1) == 2.75
        (place.path / "steps.12").write_text(step(2.5, 2, 3, 2))
        assert step_log.whole_world(place, 3, after=1) == 2.75


def test_killed_processes_are_noticed() -> None:
    (row,) = failure_detection.run(quick=True, kills=5, peer=False)
    assert -1.0 < row.value < 2000.0
    assert "of 5 kills" in row.note


def test_agents_over_sockets_are_all_told_of_the_round_and_of_its_end() -> None:
    formed, over = rendezvous.run(quick=True, sizes={50: 5.0})
    assert 0.0 < formed.value < 5.0
    assert 0.0 < over.value < 5.0


def test_where_too_few_files_may_be_open_a_rendezvous_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "file_limit", lambda: 100)
    (row,) = rendezvous.run(quick=True, sizes={500: 5.0})
    assert "simulated" in row.measure
    assert row.passed


def test_a_master_is_not_held_to_the_usual_limit_of_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        formed, _ = rendezvous.run(quick=True, sizes={300: 5.0})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert formed.value > 0.0


def test_the_page_and_the_readme_show_the_figures_that_are_kept() -> None:
    suites = {suite: page.read(suite) for suite in ("engine", "cluster")}
    shown = (page.ROOT / page.PAGE).read_text()
    for suite, results in suites.items():
        assert page.replaced(shown, suite, page.section(results)) == shown, f"{suite}: run page.write_pages()"
    readme = (page.ROOT / page.README).read_text()
    assert page.replaced(readme, page.HEADLINES, page.headlines(suites)) == readme


def test_every_headline_of_the_readme_is_a_figure_of_the_page() -> None:
    readme = (page.ROOT / page.README).read_text()
    shown = readme.partition(f"<!-- begin {page.HEADLINES} -->")[2].partition("<!-- end")[0]
    figures = re.findall(r"\*\*([^*]+)\*\*", shown)
    assert len(figures) == len(page.HEADLINE_FIGURES) == 6
    tables = (page.ROOT / page.PAGE).read_text()
    for headline, figure in zip(page.HEADLINE_FIGURES, figures, strict=True):
        assert re.search(rf"^\| {re.escape(headline.measure)} \|.* {re.escape(figure)} \|", tables, re.M), (
            headline.measure
        )


def kept_in(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages and figures of its own, so that a test does not write those of the repository."""
    (root / "docs").mkdir()
    for path in (page.PAGE, page.README):
        (root / path).write_text((page.ROOT / path).read_text())
    shutil.copytree(page.ROOT / page.RESULTS, root / page.RESULTS)
    keep = page.keep
    monkeypatch.setattr(page, "keep", lambda results: keep(results, root))


def only(monkeypatch: pytest.MonkeyPatch, rows: list[Row]) -> None:
    """Let the suite have one benchmark with these rows."""
    monkeypatch.setattr(bench, "SUITE", msgspec.structs.replace(bench.SUITE, names=("help_time",)))
    monkeypatch.setattr(help_time, "run", lambda quick: rows)


def test_a_whole_run_writes_its_section_and_the_headlines_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept_in(tmp_path, monkeypatch)
    before = (tmp_path / page.PAGE).read_text()
    measure = page.HEADLINE_FIGURES[0].measure
    only(monkeypatch, [Row(measure=measure, value=0.0625, unit="s", bar=0.03, peer=9.5, unfinished=("torchrun",))])
    assert bench.main(["--write"]) == 1, "the bar is missed, and the page says so"
    after = (tmp_path / page.PAGE).read_text()
    assert f"| {measure} | 0.03 s | 0.062 s | > 9.5 s | **missed** |" in after
    assert "commit: " in after
    assert after.partition("## Kubernetes")[2] == before.partition("## Kubernetes")[2]
    assert "| **0.062 s** | torchrun > 9.5 s |" in (tmp_path / page.README).read_text()


def test_a_run_with_a_hole_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def give_up(quick: bool) -> list[Row]:
        raise GaveUp("the master did not start")

    kept_in(tmp_path, monkeypatch)
    before = (tmp_path / page.PAGE).read_text()
    only(monkeypatch, [])
    monkeypatch.setattr(help_time, "run", give_up)
    assert bench.main(["--write"]) == 1
    assert (tmp_path / page.PAGE).read_text() == before
    with pytest.raises(SystemExit):
        bench.main(["--write", "--quick"])


@pytest.mark.parametrize(
    ("value", "shown"), [(0.1, "0.1 s"), (10.04, "10 s"), (0.0, "0 s"), (4500.0, "4,500 s"), (0.123, "0.123 s")]
)
def test_a_figure_on_the_page_claims_no_more_digits_than_it_has(value: float, shown: str) -> None:
    row = Row(measure="m", value=value, unit="s")
    machine = {"date": "2026-11-16"}
    assert f"| m |  | {shown} |" in page.section(page.Results("engine", "torchrun", machine, [row]))


def test_a_page_without_the_section_is_refused() -> None:
    with pytest.raises(ValueError, match="one section between <!-- begin engine -->"):
        page.replaced("no section", "engine", "text")


def test_the_picture_is_drawn_from_the_figures_beside_it() -> None:
    timeline = recovery_timeline.read()
    assert recovery_timeline.PICTURE.read_text() == recovery_timeline.draw(timeline), "run it with --redraw"
    theirs, ours = timeline.runs
    assert ours.next_step < theirs.next_step
    survivors = [process for process in ours.processes if process.steps[0] < 0 < process.steps[-1]]
    assert sorted(process.rank for process in survivors) == [0, 2], "the others stayed in their processes"


def test_steps_that_follow_each_other_closely_are_one_bar() -> None:
    assert list(recovery_timeline.spans([0.0, 0.02, 0.04, 0.5, 0.51])) == [(0.0, 0.04), (0.5, 0.51)]
    assert list(recovery_timeline.spans([])) == []


def test_the_exit_code_and_the_json_tell_of_a_missed_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(help_time, "run", lambda quick: [Row(measure="m", value=2.0, bar=1.0)])
    assert bench.main(["--only", "help_time", "-o", "json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["rows"][0]["passed"] is False
    assert document["machine"]["python"]


def test_a_benchmark_that_gives_up_does_not_cost_the_figures_of_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def give_up(quick: bool) -> list[Row]:
        raise GaveUp("the master did not start")

    monkeypatch.setattr(failure_detection, "run", give_up)
    monkeypatch.setattr(help_time, "run", lambda quick: [Row(measure="the other", value=1.0, bar=1.0)])
    assert bench.main(["--only", "failure_detection", "--only", "help_time"]) == 1
    output = capsys.readouterr().out
    assert "the other" in output
    assert "failure_detection gave up: the master did not start" in output
