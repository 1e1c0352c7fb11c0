"""The YAML writer: what it writes is read back as it was, by both PyYAML loaders, and typed as Go types it."""

import json
import os
import shutil
import subprocess

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import kube_yaml

# Strings that some YAML parser takes for another type, or for syntax.
TRAPS = [
    *"1e-6 1e6 0o17 017 0x1 0b1 1_000 4 -1 +1 .5 -.5 1. .inf -.inf .nan NaN yes no on Off y N true False null".split(),
    *"2026-11-30 2026-11-30T10:00:00Z 1:30 = << --- ... - | > #a &a *a !a %a @a `a 'a \"a [a {a a: :a ~ é".split(),
    *["", "- a", "? a", "a: b", "a #b", " a", "a ", "\t", "a\tb", "\u2028", "\x85", "\x7f", "$(PATHWAYS_HEAD):29001"],
]
TEXT = st.one_of(
    st.text(max_size=20),
    st.text(alphabet="\n \tab:#-'\"|>$%", max_size=30),
    st.sampled_from(TRAPS),
)
VALUES = st.recursive(
    st.one_of(TEXT, st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False, allow_infinity=False)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXT, inner, max_size=4)),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.dictionaries(TEXT, VALUES, min_size=1, max_size=5))
def test_what_is_written_is_read_back(document):
    text = kube_yaml.dump(document)
    for loader in (yaml.SafeLoader, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        assert yaml.load(text, loader) == document
    assert list(yaml.safe_load(text)) == list(document)


@pytest.mark.parametrize("trap", TRAPS)
def test_strings_that_look_like_something_else_are_quoted(trap):
    assert kube_yaml.dump({"value": trap})[7:8] == '"'


def kubectl_runs():
    """Return whether there is a kubectl that works: its parser, Go's, is the one that counts."""
    found = shutil.which("kubectl") is not None
    return found and subprocess.run(["kubectl", "version", "--client"], capture_output=True).returncode == 0


def test_kubectl_reads_what_was_written(tmp_path):
    if not kubectl_runs():
        pytest.skip("no kubectl on this machine")
    document = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "a"}}
    scripts = ["a\n", "a\nb", "  a\n b\n", "\n\na", "a\n\n\n", "\ta\nb\n", "a \n\tb"]
    spec = {"traps": TRAPS, "keys": {key: [key] for key in TRAPS}, "scripts": scripts,
            "values": [0, 5, -3, 10**15, True, None, 1.5]}  # fmt: skip
    (tmp_path / "a.yaml").write_text(kube_yaml.dump({**document, "spec": spec}))
    # `annotate --local` parses and prints an object of any kind, and asks no server.
    command = ["kubectl", "annotate", "--local", "-f", "a.yaml", "-o", "json", "a=b"]
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, check=True)
    assert json.loads(done.stdout)["spec"] == spec


@pytest.mark.parametrize("plain", ["JobSet", "gs://a/b", "--server_port=29001", "us-docker.pkg.dev/p/i:2026_09", "In"])
def test_strings_that_cannot_be_mistaken_are_plain(plain):
    assert kube_yaml.dump({"value": plain}) == f"value: {plain}\n"


def test_layout():
    document = {
        "spec": {"jobs": [{"name": "a", "count": 4, "x": "4"}, {"name": "b", "env": []}], "empty": {}, "none": None},
        "list": ["--a=1", ["b", {"c": True}]],
        "long": "w" * 70 + " " + "w" * 70,
        "script": "#!/bin/bash\n  indented \n\nlast",
        "more": {"blank": "  x\ny\n", "kept": "x\n\n"},
        "f": 1e-06,
    }
    assert kube_yaml.dump(document) == (
        "spec:\n"
        "  jobs:\n"
        "  - name: a\n"
        "    count: 4\n"
        '    x: "4"\n'
        "  - name: b\n"
        "    env: []\n"
        "  empty: {}\n"
        "  none: null\n"
        "list:\n"
        "- --a=1\n"
        "- - b\n"
        "  - c: true\n"
        f'long: "{"w" * 70} {"w" * 70}"\n'
        "script: |-\n"
        "  #!/bin/bash\n"
        "    indented \n"
        "\n"
        "  last\n"
        "more:\n"
        "  blank: |2\n"
        "      x\n"
        "    y\n"
        "  kept: |+\n"
        "    x\n"
        "\n"
        "f: 1.0e-06\n"
    )


def test_a_value_of_another_type_is_a_defect():
    with pytest.raises(TypeError, match="bytes has no place"):
        kube_yaml.dump({"a": b"x"})
