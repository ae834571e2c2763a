"""Parses YAML text into plain data, with bounds on its size, its depth and the expansion of its aliases.

It differs from `yaml.safe_load_all`: a repeated key is an error, timestamps stay text (as in Kubernetes), and only the
types of JSON are allowed. It uses PyYAML's parser in Python, which takes a few milliseconds for a usual manifest,
because the depth of the parser in C cannot be bounded.
"""

from __future__ import annotations

from typing import Any

import yaml

from resile.api.manifests.errors import BadManifest, ManifestError, shown

MAX_TEXT = 512 * 1024
"""The longest manifest file, in bytes. A cluster stores no object above 1.5 MiB; usual manifests have 2 to 20 KiB."""

MAX_DEPTH = 64
MAX_NODES = 100_000
"""The most values in one document after its aliases are expanded."""


def load_documents(text: str | bytes) -> list[Any]:
    """All documents of a YAML text except empty ones, as plain data; raises `BadManifest` with the first error only."""
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if len(raw) > MAX_TEXT:
        raise _bad(f"the manifest must be at most {MAX_TEXT // 1024} KiB, not {-(-len(raw) // 1024)} KiB")
    try:
        documents = yaml.load_all(raw.decode("utf-8"), _Loader)
        return [document for document in documents if document is not None]
    except UnicodeDecodeError:
        raise _bad("the manifest is not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise _bad(_told(error)) from None


class _Loader(yaml.SafeLoader):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise _Refused(f"is nested deeper than {MAX_DEPTH} levels", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_document(self, node: yaml.Node) -> Any:
        if _expanded(node, {}) > MAX_NODES:
            raise _Refused(f"holds more than {MAX_NODES} values once its aliases are expanded", node.start_mark)
        return super().construct_document(node)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise _Refused(f"has the key {shown(key.value)} twice", key.start_mark)
                seen.add(key.value)
        return node

    def construct_unquoted(self, node: yaml.ScalarNode) -> Any:
        try:
            return yaml.SafeLoader.yaml_constructors[node.tag](self, node)
        except (ValueError, LookupError):
            raise _Refused(f"has a value that cannot be read, {shown(node.value)}", node.start_mark) from None


class _Refused(yaml.MarkedYAMLError):
    def __init__(self, problem: str, mark: yaml.Mark) -> None:
        super().__init__(problem=problem, problem_mark=mark)


def _expanded(node: yaml.Node, sizes: dict[int, int]) -> int:
    """The number of values in a YAML node after its aliases are expanded; `sizes` caches results by the node's `id`."""
    known = sizes.get(id(node))
    if known is not None:
        if known == 0:
            raise _Refused("has an alias that refers to itself", node.start_mark)
        return known
    sizes[id(node)] = 0
    total = 1
    if isinstance(node, yaml.SequenceNode):
        total += sum(_expanded(item, sizes) for item in node.value)
    elif isinstance(node, yaml.MappingNode):
        total += sum(_expanded(key, sizes) + _expanded(value, sizes) for key, value in node.value)
    sizes[id(node)] = total
    return total


def _told(error: yaml.YAMLError) -> str:
    if isinstance(error, _Refused) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1} {error.problem}"
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"the manifest is not YAML: {error.problem} at line {mark.line + 1}, column {mark.column + 1}"
    return f"the manifest is not YAML: {' '.join(str(error).split())}"


def _bad(problem: str) -> BadManifest:
    return BadManifest([ManifestError("", problem)])


_PLAIN = ("null", "str", "seq", "map")
_UNQUOTED = ("bool", "int", "float")
_Loader.yaml_constructors = {
    **{f"tag:yaml.org,2002:{name}": yaml.SafeLoader.yaml_constructors[f"tag:yaml.org,2002:{name}"] for name in _PLAIN},
    **{f"tag:yaml.org,2002:{name}": _Loader.construct_unquoted for name in _UNQUOTED},
    None: yaml.SafeLoader.yaml_constructors[None],
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
