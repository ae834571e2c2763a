"""Texts that are no manifest at all, or that mean harm."""

import contextlib
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resile.api.kinds.elasticjob.resource import ElasticJob
from resile.api.kinds.scaleplan.resource import ScalePlan
from resile.api.manifests.documents import MAX_DEPTH, MAX_NODES, MAX_TEXT, load_documents
from resile.api.manifests.errors import BadManifest
from resile.api.manifests.reader import load_manifests

PLAN = """
apiVersion: elastic.iml.github.io/v1alpha1
kind: ScalePlan
metadata: {name: plan-0}
spec: {ownerJob: a, psHosts: [b]}
"""
JOB = """
apiVersion: elastic.iml.github.io/v1alpha1
kind: ElasticJob
metadata: {name: a}
spec: {replicaSpecs: {worker: {replicas: 1, template: {spec: {containers: [{name: main}]}}}}}
"""


def laughs(levels: int) -> str:
    lines = ["a0: &a0 [x,x,x,x,x,x,x,x,x,x]"]
    lines += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines)


def merging_laughs(levels: int) -> str:
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{n}: &a{n} {{<<: [{','.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the manifest is empty; it must hold an ElasticJob or ScalePlan"),
        ("# only a comment\n", "the manifest is empty; it must hold an ElasticJob or ScalePlan"),
        ("---\n---\n", "the manifest is empty; it must hold an ElasticJob or ScalePlan"),
        ("hello", "a manifest must be a mapping with apiVersion, kind, metadata and spec, not 'hello'"),
        ("a: b: c", "the manifest is not YAML: mapping values are not allowed here at line 1, column 5"),
        ("[1", "the manifest is not YAML: expected ',' or ']', but got '<stream end>' at line 1, column 3"),
        ("a: *b", "the manifest is not YAML: found undefined alias 'b' at line 1, column 4"),
        (
            "a: !!python/object/apply:os.system [true]",
            "the manifest is not YAML: could not determine a constructor for the tag "
            "'tag:yaml.org,2002:python/object/apply:os.system' at line 1, column 4",
        ),
        (
            "a: !!binary aaaa",
            "the manifest is not YAML: could not determine a constructor for the tag 'tag:yaml.org,2002:binary' "
            "at line 1, column 4",
        ),
        ("a: 1\nb: 2\na: 3", "line 3 has the key 'a' twice"),
        ("a: &a [*a]", "line 1 has an alias that refers to itself"),
        ("a: !!int x", "line 1 has a value that cannot be read, 'x'"),
        ("a: !!int ''", "line 1 has a value that cannot be read, ''"),
        ("a: !!bool x", "line 1 has a value that cannot be read, 'x'"),
        ("[" * 5000, f"line 1 is nested deeper than {MAX_DEPTH} levels"),
        ("a: " + "{a: " * 100 + "1" + "}" * 100, f"line 1 is nested deeper than {MAX_DEPTH} levels"),
        (laughs(9), f"line 1 holds more than {MAX_NODES} values once its aliases are expanded"),
        (merging_laughs(9), f"line 1 holds more than {MAX_NODES} values once its aliases are expanded"),
        (" " * (MAX_TEXT + 1), "the manifest must be at most 512 KiB, not 513 KiB"),
        (b"\xff\xfe\xff", "the manifest is not UTF-8 text"),
        ("\ud800", "the manifest is not UTF-8 text"),
    ],
)
def test_a_text_that_is_no_manifest_gets_one_sentence_soon(text: str | bytes, sentence: str) -> None:
    started = time.monotonic()
    with pytest.raises(BadManifest) as caught:
        load_manifests(text)
    assert [str(error) for error in caught.value.errors] == [sentence]
    assert time.monotonic() - started < 5


def test_a_number_of_thousands_of_digits_is_refused() -> None:
    with pytest.raises(BadManifest, match=r"^line 1 has a value that cannot be read, '999"):
        load_documents("a: " + "9" * 5000)


def test_control_characters_are_refused() -> None:
    with pytest.raises(BadManifest, match=r"^the manifest is not YAML: unacceptable character"):
        load_documents("a: \x00")


def test_several_documents_are_read_and_empty_ones_passed_over() -> None:
    job, plan = load_manifests(f"---\n{JOB}---\n---\n# nothing\n---\n{PLAN}")
    assert isinstance(job, ElasticJob)
    assert isinstance(plan, ScalePlan)


def test_errors_name_their_document_where_there_are_several() -> None:
    with pytest.raises(BadManifest) as caught:
        load_manifests(f"{JOB}\n---\n{PLAN}\nspce: 1\n---\nkind: Pod")
    assert [str(error) for error in caught.value.errors] == [
        "document 2: spce: unknown field; did you mean spec?",
        "document 3: apiVersion: must be elastic.iml.github.io/v1alpha1, not nothing",
        "document 3: kind: must be ElasticJob or ScalePlan, not 'Pod'",
    ]


def test_honest_aliases_and_merge_keys_work() -> None:
    text = "base: &b {x: 1, y: 2}\nmore: &m {<<: *b, y: 3}\nmost: {<<: *m, y: 4}\nsame: *b"
    (document,) = load_documents(text)
    assert document["most"] == {"x": 1, "y": 4}
    assert document["same"] == {"x": 1, "y": 2}


def test_a_merged_mapping_that_stands_deeper_than_its_use_is_no_duplicate() -> None:
    (document,) = load_documents("a: {b: {c: &c {<<: {x: 1}, x: 2}}}\nd: {<<: *c}")
    assert document["d"] == {"x": 2}


def test_timestamps_stay_text_as_kubernetes_reads_them() -> None:
    assert load_documents("at: 2023-09-26T03:52:20Z") == [{"at": "2023-09-26T03:52:20Z"}]


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=40) | st.text(alphabet="{}[]&*!<>:-?|'\"% \n\tab1~", max_size=40) | st.binary(max_size=30))
def test_any_text_is_read_or_refused_and_nothing_else(text: str | bytes) -> None:
    with contextlib.suppress(BadManifest):
        load_documents(text)
