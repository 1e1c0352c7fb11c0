"""The launch-render reader: noisy streams, shell words against bash itself, clients and their refusals."""

import base64
import bz2
import shlex
import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import launch_render as lr
from bench_common import BenchError

OBJECT = "apiVersion: v1\nkind: JobSet\nmetadata:\n  name: {}\nspec:\n  a: 1\n"
RUN = "python -m tunix.experimental.distributed.runtime.main"


def script(startup: str) -> str:
    return f'echo "Program Start: $(date)"\n(\n  {startup}\n) & PID=$!\nwait $PID\n'


def client(startup: str) -> lr.Client:
    return lr.parse_client({}, (), script(startup), "f:1")


# --- streams ---


def test_log_lines_before_between_and_inside_documents_are_passed_over():
    stream = (
        "kubectl delete jobset a\na-roll-0\n---\n# comment\n\n" + OBJECT.format("a") + "\nTrainer images: server=x\n"
        "[launcher] cache: gs://b\n---\n" + OBJECT.format("b") + "error: no context exists with the name: c\n"
    )
    render = lr.read_render(stream, "s")
    assert [(d.kind, d.name, d.line) for d in render.documents] == [("JobSet", "a", 6), ("JobSet", "b", 16)]
    assert render.documents[0].data["spec"] == {"a": 1} and len(render.documents[0].data) == 4
    assert [note.split(":")[1] for note in render.notes] == ["1", "13", "14", "22"]


def test_separators_with_a_comment_and_lines_of_dashes():
    stream = "---  # orchestrator\n" + OBJECT.format("a") + "--- done ---\n-----\n--- \n" + OBJECT.format("b")
    render = lr.read_render(stream, "s")
    assert [(d.name, d.data["spec"]) for d in render.documents] == [("a", {"a": 1}), ("b", {"a": 1})]
    assert [note.rpartition(": ")[2] for note in render.notes] == ["--- done ---", "-----"]
    binding = lr.read_render("apiVersion: v1\nkind: RoleBinding\nsubjects:\n- kind: User\n-\n  kind: Group\n", "s")
    assert [subject["kind"] for subject in binding.documents[0].data["subjects"]] == ["User", "Group"]


def test_documents_without_separator_are_told_apart():
    render = lr.read_render(OBJECT.format("a") + OBJECT.format("b"), "s")
    assert [d.name for d in render.documents] == ["a", "b"]


def test_a_traceback_inside_a_document_takes_its_indented_lines_with_it():
    trace = (
        'Traceback (most recent call last):\n  File "x.py", line 3, in f\n    raise ValueError\nValueError: gang id\n'
    )
    render = lr.read_render(OBJECT.format("a") + trace + "---\n" + OBJECT.format("b"), "s")
    assert [d.data["spec"] for d in render.documents] == [{"a": 1}, {"a": 1}]


def test_an_empty_document_is_noted():
    render = lr.read_render(OBJECT.format("a") + "---\n\n---\n" + OBJECT.format("b"), "s")
    assert render.notes == ["s:8: a document without content; did the launcher's generator fail?"]


def test_duplicate_keys_are_noted_and_the_last_one_counts():
    render = lr.read_render("kind: JobSet\nmetadata:\n  labels: {a: 1}\n  name: x\n  labels:\n    a: 2\n", "s")
    assert render.documents[0].data["metadata"]["labels"] == {"a": 2}
    assert render.notes == ["s:5: duplicate key 'labels', the last one counts"]


def test_scalars_are_read_as_go_reads_them():
    data = lr.read_render("kind: X\nspec: [2026-11-30, 1:30, 010, 1.5, on, 0x1F, 1_0, 1e-6]\n", "s").documents[0].data
    assert data["spec"] == ["2026-11-30", "1:30", 8, 1.5, True, 31, 10, "1e-6"]


def test_a_secret_in_a_log_line_is_masked():
    render = lr.read_render("export HF_TOKEN=hf_abc WANDB_API_KEY: xyz\n---\n" + OBJECT.format("a"), "s")
    assert "hf_abc" not in render.notes[0] and "xyz" not in render.notes[0] and "***" in render.notes[0]


@pytest.mark.parametrize("line", ["x" * 10**6, "HF_TOKEN=" + "x" * 10**6, "a=" * 10**5])
def test_a_long_log_line_costs_what_its_length_costs(line):
    """Without `---` and `apiVersion:` it is only shown, cut short; the time limit of test_robustness is 20 s."""
    render = lr.read_render(f"{line}\n---\n" + OBJECT.format("a"), "s")
    assert len(render.notes[0]) < 150


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        ("", "no Kubernetes object"),
        ("kubectl delete jobset a\n", "no Kubernetes object"),
        ("---\n---\n", "no Kubernetes object"),
        ("apiVersion: v1\nkind: JobSet\nspec:\n  a: [1,\n", "s:4: not YAML"),
        ("apiVersion: v1\nkind: JobSet\nspec:\n  a: 'x\n", "not YAML"),
        ("apiVersion: v1\nmetadata:\n  name: a\n", "an object without a kind"),
        ("apiVersion: v1\nkind: [a]\n", "an object without a kind"),
        ("apiVersion: v1\nkind: A\nspec: !!python/object:os.system {}\n", "not YAML"),
        ("apiVersion: v1\nkind: A\nspec:\n  a: &x [1, 2]\n  b: *x\n", "s:4: a YAML alias"),
        ("apiVersion: v1\nkind: A\nspec: " + "[" * 3000 + "]" * 3000 + "\n", "s:3"),
        ("apiVersion: v1\nkind: A\nspec: " + "[" * 101 + "]" * 101 + "\n", "s:3: nested too deeply"),
        ("apiVersion: v1\nkind: A\nspec: {? [a] : b}\n", "not YAML"),
        (
            "apiVersion: v1\nkind: A\nspec:\n  x: |\n    (\n      python --a=1\nb --c=2\n    ) & PID=$!\n",
            "s:7: a line break",
        ),
    ],
)
def test_streams_that_cannot_be_read(stream, message):
    with pytest.raises(BenchError, match=".") as error:
        lr.read_render(stream, "s")
    assert message in str(error.value) and "\n" not in str(error.value)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.text(alphabet="ab:-# \n'\"[]{}|>&*!%@`kindapiVersion0", max_size=200))
def test_any_text_is_read_or_refused_in_one_line(text):
    try:
        lr.read_render("apiVersion: v1\nkind: A\n" + text, "s")
    except BenchError as error:
        assert "\n" not in str(error)


# --- shell words ---

ESCAPED = [
    '"\\$x"',
    '"a\\"b"',
    '"\\\\"',
    "\\ ",
    "\\'",
    '\\"',
    "\\$",
    '"a\\bc"',
    '"$ "',
    "'$'",
    "\\\\",
    '"a\\\nb"',
    "a\\\nb",
]
PIECES = st.one_of(
    st.text(alphabet="abz019=,.:/@%+-_^~é", min_size=1, max_size=8),
    st.text(alphabet='ab $`"\\!#{}()<>|;&\t\n*?[]', max_size=8).map(lambda s: f"'{s}'"),
    st.text(alphabet="ab '!#{}()<>|;&\t\n*?[],=", max_size=8).map(lambda s: f'"{s}"'),
    st.sampled_from(ESCAPED),
)
WORDS = st.tuples(st.sampled_from([" ", "  ", "\t", " \\\n ", "         "]), st.lists(PIECES, min_size=1, max_size=4))


@settings(max_examples=2, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.lists(WORDS, min_size=1, max_size=5), min_size=100, max_size=100))
def test_shell_words_agree_with_bash(commands):
    """Many commands in one bash; `x` before each word keeps it from being a comment or a tilde."""
    texts = ["".join(blank + "x" + "".join(parts) for blank, parts in command) for command in commands]
    program = "".join(f"printf '%s\\0' {text.lstrip()}\nprintf '\\1\\0'\n" for text in texts)
    run = subprocess.run(["bash", "--norc", "-f"], input=program.encode(), capture_output=True, check=True)
    expected = [block.split("\0")[:-1] for block in run.stdout.decode().split("\1\0")[:-1]]
    for text, want in zip(texts, expected, strict=True):
        words = lr.shell_words(text)
        assert [word.text for word in words] == want, text
        assert not any((word.live and "$(" not in word.text) or word.operator for word in words), text


def test_an_open_quote_shows_no_secret():
    with pytest.raises(BenchError) as error:
        lr.shell_words('A=1 HF_TOKEN="s3cr3t more  B=2')
    assert str(error.value).startswith("a quote opened in 'HF_TOKEN=***' does not close")


@pytest.mark.parametrize(
    ("text", "live", "bare"),
    [
        ("--a=$X", True, True),
        ('--a="$X"', True, False),
        ('--a="${X:-a b}"', True, False),
        ('--a="$(hostname -f "x y")"', True, False),
        ("--a=`date`", True, True),
        ("--a='$X'", False, False),
        ("--a='$(JOB_INDEX)'", True, False),  # the kubelet knows no quotes
        ("--a='$$(JOB_INDEX)'", False, False),
        ("--a='^x$'", False, False),
        ('--a="x$"', False, False),
        ("--a={1,2}", True, True),
        ("--a='{1,2}'", False, False),
        ("--a=${X}", True, True),
    ],
)
def test_what_bash_and_the_kubelet_change(text, live, bare):
    (word,) = lr.shell_words(text)
    assert (word.raw, word.live, word.bare) == (text, live, bare)


def test_operators_are_told_from_words():
    words = lr.shell_words("pip install x && A=1 python>f")
    assert [word.raw for word in words if word.operator] == ["&&", ">"]


@pytest.mark.parametrize("text", ["'a", '"a b', "a\"b'", '"$(x', "`x"])
def test_quotes_that_do_not_close(text):
    with pytest.raises(BenchError, match="does not close"):
        lr.shell_words(text)


# --- the kubelet ---


@given(st.text(alphabet="$()AB x"))
@settings(deadline=None, derandomize=True)
def test_kube_escape_is_undone_by_the_kubelet(text):
    assert lr.kube_expand(lr.kube_escape(text), {"A": "1", "B": "2", "": "3"}) == text


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("$(A)", "1"),
        ("$(B)", "$(B)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$A $ $", "$A $ $"),
        ("$(date)", "$(date)"),
    ],
)
def test_kube_expand(text, result):
    assert lr.kube_expand(text, {"A": "1"}) == result


# --- clients ---


def test_a_client_is_taken_apart():
    got = client(
        "A=1 B=\"x y\"    C='--p=1 --q'  D=   A=2     "
        + RUN
        + " --process_main=e.run_trainer_node.main --a=1 --bare --a=\"{'k': 2}\"      "
    )
    assert [name for name, _ in got.assignments] == ["A", "B", "C", "D", "A"]
    assert got.env == {"A": "2", "B": "x y", "C": "--p=1 --q", "D": ""}
    assert got.flags == {"--process_main": "e.run_trainer_node.main", "--a": "{'k': 2}", "--bare": None}
    assert got.assignments[1][1].raw == '"x y"' and not got.is_bench
    assert got.before + got.startup + got.after == got.script


@pytest.mark.parametrize(
    ("startup", "token"),
    [
        ("A=1 pip install x && B=2 " + RUN, "'pip'"),
        ("mkdir -p /c; A=1 " + RUN, "'mkdir'"),
        ("A=1 " + RUN + " --a=1 positional", "'positional'"),
        ("A=1 " + RUN + " --a 1", "'1'"),
        ("A=1 " + RUN + " --process --a=1", "'--process'"),
        ("A=1 " + RUN + " --a=1 && echo done", "'&&'"),
        ("A=1 " + RUN + " --a=1 # note", "'#'"),
        ("A=1 python train.py --a=1", "'train.py'"),
        ("A=1 python -u -m tunix.experimental.distributed.runtime.main", "'-u'"),
        ("A=1 python", "'(nothing)'"),
        ("A=1", "'(nothing)'"),
        ("HF_TOKEN_FILE=x HF_TOKEN=s3cr3t; " + RUN, "';'"),
        ("if true; then " + RUN + "; fi", "'if'"),
        ("A='1 " + RUN, "does not close"),
    ],
)
def test_startups_that_are_not_assignments_program_flags(startup, token):
    with pytest.raises(BenchError) as error:
        client(startup)
    assert token in str(error.value) and "f:1" in str(error.value) and "s3cr3t" not in str(error.value)


def test_a_script_cut_short_is_refused():
    text = script(RUN)
    with pytest.raises(BenchError, match="no start-up command"):
        lr.parse_client({}, (), text[: text.index(") & PID")], "f:1")


@pytest.mark.parametrize(
    ("text", "role"),
    [
        (RUN + " --process_main=tunix.experimental.examples.common.run_trainer_node.main", "trainer"),
        (RUN + " --process_main=tunix.experimental.examples.math_gsm8k_dist.run_trainer_node.main", "trainer"),
        (RUN + " --process_main=a.run_mock_trainer_node.main", "mock_trainer"),
        (RUN + " --discovery_id=o --process_main=a.run_deepswe_dist.main", "orchestrator"),
        (RUN + " --discovery_addrs=o:1 --process_main=a.run_rollout_node.main", "run_rollout_node"),
        ('A=1 \\\npython "$BENCH_DIR/bench_driver.py" --steps=3', "bench"),
        ("echo run_trainer_node.main", ""),
    ],
)
def test_roles(text, role):
    assert lr.script_role(text) == role


def test_a_bench_is_read_back_with_its_sources_and_argv():
    packed = base64.encodebytes(bz2.compress(b'{"b.py": "Y = \'$\'\\n"}')).decode()
    text = (
        "cat > \"$BENCH_DIR/a.py\" <<'BENCH_DRIVER_EOF_2'\nX = '$$(date) BENCH_DRIVER_EOF'\n(\nBENCH_DRIVER_EOF_2\n"
        f"base64 -d > \"$BENCH_DIR/modules.json.bz2\" <<'BENCH_DRIVER_EOF'\n{packed}BENCH_DRIVER_EOF\n"
        'BENCH_LIVE_0=--w="x-${JOB_INDEX}"\n(\nA="1" \\\n'
        "TRAINER_ARGV='--a=1 '\"${BENCH_LIVE_0@Q}\"' --b='\"'\"'x y'\"'\"'' \\\nORCH_ARGV='' \\\n"
        'python "$BENCH_DIR/bench_driver.py" --steps=3\n) & PID=$!\n'
    )
    got = lr.parse_client({}, (), text, "f:1")
    assert got.is_bench and got.role == "bench"
    assert got.sources == {"a.py": "X = '$(date) BENCH_DRIVER_EOF'\n(\n", "b.py": "Y = '$'\n"}
    assert got.carried_argv("TRAINER_ARGV") == ["--a=1", "--w=x-${JOB_INDEX}", "--b=x y"]
    assert got.carried_argv("ORCH_ARGV") == [] and got.flags == {"--steps": "3"}


@pytest.mark.parametrize("packed", [b"AAAA", *(base64.b64encode(bz2.compress(json)) for json in
                                    (b"x", b"[1]", b"3", b'{"a.py": 1}', b"[" * 100_000))])  # fmt: skip
def test_a_packed_source_that_was_edited_is_refused(packed):
    text = f"base64 -d > \"$BENCH_DIR/modules.json.bz2\" <<'BENCH_DRIVER_EOF'\n{packed.decode()}\nBENCH_DRIVER_EOF\n"
    text += script(RUN)
    with pytest.raises(BenchError, match="modules.json.bz2 of the client cannot be unpacked"):
        lr.parse_client({}, (), text, "f:1")


# --- flags ---


def test_flags_and_keys():
    assert lr.flag_items(["--a=b=c", "--d", "--e="]) == [("--a", "b=c"), ("--d", None), ("--e", "")]
    assert lr.key_values(" a=1  b=x=y a=2 ") == [("a", "1"), ("b", "x=y"), ("a", "2")]
    for bad in ("a=1 b", "=1"):
        with pytest.raises(BenchError, match="is not key=value"):
            lr.key_values(bad)


def test_slice_of():
    document = lr.Document({"spec": [{"args": ["--x=1", "--instance_type=tpu7x:4x4x8"]}, {"args": None}]}, "s", 1)
    assert lr.slice_of(document) == "tpu7x:4x4x8"
    assert lr.slice_of(lr.Document({"spec": {"args": {}}}, "s", 1)) is None


def test_words_of_a_split_are_those_of_shlex_where_nothing_is_live():
    line = "A=1 --m='^(?!.*x/y).*' --d=\"{'k': 0.1}\" E="
    assert [word.value for word in lr.shell_words(line)] == shlex.split(line)
