"""`edgeinfer batch`: the format, continuing after a kill, and no answer lost or made twice."""

import argparse
import errno
import fcntl
import itertools
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from fake_engine import FakeEngine, FakeHost

from edgeinfer.cli.parser import build_parser
from edgeinfer.cli.verbs import batch
from edgeinfer.config.config_file import Config, ReceiptsConfig
from edgeinfer.errors import ConfigError, DecodeError, DiskFullError, ModelBusyError, UsageError
from edgeinfer.host import EngineHost
from edgeinfer.server import batches


def _options(*typed: str) -> argparse.Namespace:
    return build_parser("batch").parse_args(["batch", *typed])


def _chat(custom_id: str, **body) -> dict:
    turns = [{"role": "user", "content": custom_id}]
    body = {"messages": turns, "max_tokens": 4, "temperature": 0} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


@pytest.fixture
def files(tmp_path):
    def write(*lines: object):
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        (tmp_path / "in.jsonl").write_text(f"{text}\n")
        return tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    return write


def _repeat(request):
    return [f"<{request.messages[-1].content if request.messages else request.prompt}>"]


def _run(files_, engine=None, *typed):
    engine = engine or FakeEngine(_repeat)
    options = _options(*map(str, files_), "--quiet", *typed)
    return batch.run(options, FakeHost(lambda model: engine)), engine


def _answers(path: Path) -> dict[str, dict]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line for line in lines}


@pytest.mark.parametrize("typed", [["--receipts"], []])
def test_wrong_signing_key_is_found_before_the_first_answer(files, tmp_path, typed):
    host = FakeHost(lambda model: pytest.fail("a model was loaded"))
    host._config = Config(receipts=ReceiptsConfig(key=str(tmp_path / "none")))
    options = _options(*map(str, files(_chat("1", **({} if typed else {"receipt": True})))), *typed)
    with pytest.raises(ConfigError, match="none: No such file"):
        batch.run(options, host)


def test_every_line_is_answered_in_openais_format(files):
    lines = [
        _chat("a"),
        {"custom_id": "b", "url": "/v1/completions", "body": {"prompt": "p"}},
        {"custom_id": "c", "url": "/v1/embeddings", "body": {"input": "x"}},
        {"custom_id": "d", "url": "/v1/responses", "body": {"input": "y"}},
    ]
    paths = files(*lines)
    result, _ = _run(paths)
    assert (result.done, result.failed, result.skipped, result.total) == (4, 0, 0, 4)
    answers = _answers(paths[1])
    assert answers["a"]["response"]["status_code"] == 200
    assert answers["a"]["response"]["body"]["choices"][0]["message"]["content"] == "<a>"
    assert answers["b"]["response"]["body"]["choices"][0]["text"] == "<p>"
    assert answers["c"]["response"]["body"]["data"][0]["object"] == "embedding"
    assert answers["d"]["response"]["body"]["output"][0]["content"][0]["text"] == "<y>"
    assert answers["a"]["error"] is None
    assert result.exit_code == 0
    assert "4 done" in result.human()


def test_a_wrong_request_is_an_answer_with_its_status(files):
    paths = files(_chat("good"), _chat("bad", temperature=99), _chat("other", model="gpt-4o"))
    result, _ = _run(paths)
    answers = _answers(paths[1])
    assert answers["bad"]["response"]["status_code"] == 400
    assert answers["bad"]["response"]["body"]["error"]["param"] == "temperature"
    assert answers["other"]["response"]["status_code"] == 200  # the only model answers to any name
    assert (result.failed, result.exit_code) == (1, 1)
    summary, reason, _ = result.human().splitlines()
    assert summary == f"2 done, 0 already there, 1 failed, of 3: {paths[1]}"
    assert "`response.body.error`" in reason


def test_a_second_run_does_only_what_is_missing(files):
    paths = files(*(_chat(str(n)) for n in range(10)))
    _run(paths)
    lines = paths[1].read_text().splitlines()[:6]
    paths[1].write_text("\n".join([*lines, '{"id":"batch_torn","custom_id":"9"']))
    result, engine = _run(paths)
    assert (result.done, result.skipped) == (4, 6)
    assert len(engine.requests) == 4
    assert set(_answers(paths[1])) == {str(n) for n in range(10)}
    result, engine = _run(paths)
    assert (result.done, result.skipped, len(engine.requests)) == (0, 10, 0)


def test_a_second_run_tries_failed_lines_again(files, tmp_path):
    _run(files(_chat("a"), _chat("b", temperature=99), _chat("c", temperature=99), _chat("d")))
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "out.jsonl")
    os.chmod(tmp_path / "out.jsonl", 0o640)
    again = files(_chat("a"), _chat("b"), _chat("c", temperature=99), _chat("e"))
    result, engine = _run((again[0], tmp_path / "link.jsonl"))
    assert (result.done, result.skipped, result.failed, result.retried) == (3, 1, 1, 2)
    assert "2 had failed in an earlier run and were tried again" in result.human()
    assert [request.messages[-1].content for request in engine.requests] == ["b", "e"]
    statuses = {key: line["response"]["status_code"] for key, line in _answers(again[1]).items()}
    assert statuses == {"a": 200, "b": 200, "c": 400, "d": 200, "e": 200}
    assert (tmp_path / "link.jsonl").is_symlink()
    assert os.stat(again[1]).st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "link.jsonl", "out.jsonl"]


def test_a_run_that_replaces_failed_lines_still_holds_the_output(files):
    paths = files(_chat("a", temperature=99), _chat("b"))
    _run(paths)
    refused = []

    def meanwhile(request):
        with pytest.raises(ModelBusyError):
            _run(paths)
        refused.append(request)
        return ["x"]

    _run(files(_chat("a"), _chat("b")), FakeEngine(meanwhile))
    assert len(refused) == 1


def _write_answers(path: str, pattern: str) -> dict[str, str]:
    """Write a line for each letter, capitals for failed requests; return custom_id → line if answered."""
    lines = {}
    for number, letter in enumerate(pattern):
        response = {"status_code": 400 if letter.isupper() else 200, "body": "x" * (50 * number)}
        answer = {"custom_id": f"{number}", "response": response}
        lines[f"{number}"] = " " * (letter in "bB") + json.dumps(answer)
    Path(path).write_text("".join(f"{line}\n" for line in lines.values()))
    return {
        key: lines[key].strip() for key, letter in zip(lines, pattern, strict=True) if letter.islower()
    }


@pytest.fixture
def busy_output(monkeypatch):
    """Let no file be replaced, as if OUT were a mounted file."""

    def refuse(*_, **_folders):
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(os, "replace", refuse)


def _remove_failed(path: str) -> None:
    with batch._open_output(Path(path)) as output:
        failed = {
            custom_id for custom_id, has_failed in batch.read_output(output).items() if has_failed
        }
        with batch._without_lines(Path(path), output, failed) as rewritten:
            os.write(rewritten, b'{"custom_id": "new"}\n')


@pytest.mark.parametrize("pattern", ["aAa", "AaBAbA", "ABA", "aABABb", "AAAAa"])
def test_no_answer_is_lost_if_a_run_is_killed_while_it_removes_lines(
    files, busy_output, monkeypatch, pattern
):
    _, path = files()
    real_write = os.pwrite
    for n_writes in itertools.count():
        answered, writes_left = _write_answers(path, pattern), [n_writes]

        def write(output, text, offset, countdown=writes_left):
            countdown[0] -= 1
            if countdown[0] < 0:  # the run is killed in the middle of this write
                real_write(output, text[: len(text) // 2], offset)
                raise KeyboardInterrupt
            return real_write(output, text, offset)

        monkeypatch.setattr(os, "pwrite", write)
        was_killed = False
        try:
            _remove_failed(path)
        except KeyboardInterrupt:
            was_killed = True
            monkeypatch.setattr(os, "pwrite", real_write)
            _remove_failed(path)
        lines = [line.strip() for line in Path(path).read_text().splitlines()]
        assert lines == [*answered.values(), '{"custom_id": "new"}']
        assert sorted(os.listdir(os.path.dirname(path))) == ["in.jsonl", "out.jsonl"]
        if not was_killed:
            break


def test_failed_lines_of_an_output_that_cannot_be_replaced_are_tried_again(files, busy_output):
    _run(files(_chat("a", temperature=99), _chat("b"), _chat("c", temperature=99)))
    paths = files(_chat("a"), _chat("b"), _chat("c", temperature=99))
    result, _ = _run(paths)
    assert (result.done, result.skipped, result.failed, result.retried) == (2, 1, 1, 2)
    statuses = {key: line["response"]["status_code"] for key, line in _answers(paths[1]).items()}
    assert statuses == {"a": 200, "b": 200, "c": 400}


def test_answers_after_a_replacement_are_kept_if_its_folder_cannot_be_flushed(files, monkeypatch):
    path = files()[1]
    _write_answers(path, "aA")
    real_sync = os.fsync

    def refuse_folders(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real_sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    _remove_failed(str(path))
    assert "new" in _answers(path)


def test_the_output_may_be_a_device(files):
    paths = files(_chat("a"), _chat("b", temperature=99))
    for _ in range(2):
        result, _ = _run((paths[0], os.devnull))
        assert (result.done, result.failed, result.skipped) == (2, 1, 0)


def test_a_disk_is_not_overwritten(files, monkeypatch):
    source, path = files(_chat("a"))
    path.write_text("")
    monkeypatch.setattr(Path, "is_block_device", lambda self: self == path)
    with pytest.raises(UsageError, match="is a disk, not a file"):
        _run((source, path))
    assert not path.read_text()


def test_the_output_may_be_a_pipe(files, tmp_path):
    paths = files(_chat("a"), _chat("b"))
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with open(reader) as file:
        _run((paths[0], str(tmp_path / "pipe")))
        assert {json.loads(line)["custom_id"] for line in file} == {"a", "b"}


@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_answers_on_stdout_are_followed_by_nothing(files, tmp_path, kind):
    paths = files(*(_chat(str(n)) for n in range(45)))
    path = ":".join([os.path.dirname(__file__), *sys.path])
    command = [sys.executable, "-c", _SHAKY, "0", path, paths[0], "/dev/stdout"]
    with open(paths[1], "w") as file:
        to = file if kind == "file" else subprocess.PIPE
        done = subprocess.run(command, stdout=to, stderr=subprocess.PIPE, text=True, check=True)
    lines = (done.stdout or Path(paths[1]).read_text()).splitlines()
    assert {json.loads(line)["custom_id"] for line in lines} == {str(n) for n in range(45) if n % 3}
    assert "30 done, 0 already there, 0 failed, of 45: /dev/stdout" in done.stderr


def test_stdout_is_refused_as_output_if_the_result_goes_there_as_json(files, tmp_path, monkeypatch):
    paths = files(_chat("a"))
    monkeypatch.setattr(batch, "_is_stdout", lambda _output: True)
    with pytest.raises(UsageError, match="needs stdout for its result"):
        _run(paths, None, "--json")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "in.jsonl:2"),
        ({"custom_id": "x", "url": "/v1/files", "body": {}}, "/v1/chat/completions, /v1/completions"),
        ({"custom_id": "x", "url": "/v1/completions"}, "body"),
        ({"custom_id": "x", "url": "/v1/completions", "body": {}, "priority": 1}, "priority"),
        ({"custom_id": "a", "url": "/v1/completions", "body": {}}, "already used on line 1"),
        (_chat("x", stream=True), "stream"),
        ({"custom_id": "x", "method": "GET", "url": "/v1/completions", "body": {}}, "method"),
    ],
)
def test_a_line_that_is_no_request_is_named_before_anything_runs(files, line, said):
    paths = files(_chat("a"), line)
    with pytest.raises(UsageError, match=said):
        _run(paths)
    assert not paths[1].exists()


@pytest.mark.parametrize("text", ["my notes\n", "my notes", '{"my": "notes"}'])
def test_an_output_file_of_something_else_is_left_alone(files, text):
    paths = files(_chat("a"))
    paths[1].write_text(text)
    with pytest.raises(UsageError, match="a line that is not an answer"):
        _run(paths)
    assert paths[1].read_text() == text


def test_two_runs_do_not_share_an_output(files):
    paths = files(_chat("a"))
    with open(paths[1], "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ModelBusyError):
            _run(paths)


def test_missing_input_file_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"nowhere\.jsonl"):
        _run((tmp_path / "nowhere.jsonl", tmp_path / "out"))


def test_a_full_queue_is_waited_for(files):
    paths = files(*(_chat(str(n)) for n in range(12)))
    engine = FakeEngine([["x"]], max_inside=2)
    result, _ = _run(paths, engine)
    assert (result.done, result.failed) == (12, 0)


@pytest.fixture
def hasty(monkeypatch):
    """Let `edgeinfer batch` retry without pauses."""
    monkeypatch.setattr(batches, "_BUSY_PAUSES_S", (0.0,) * 7)
    monkeypatch.setattr(batches, "_DEFECT_PAUSES_S", (0.0, 0.0))


def _failing(*scripts):
    """Return an engine that plays `scripts` in turn for the request "b", the last one repeatedly."""
    scripts_left = list(scripts)

    def choose(request):
        if request.messages[-1].content != "b":
            return ["fine"]
        return scripts_left.pop(0) if len(scripts_left) > 1 else scripts_left[0]

    return FakeEngine(choose)


def test_temporary_failure_is_retried_in_the_same_run(files, hasty):
    paths = files(_chat("a"), _chat("b"))
    broken = [DecodeError("llama_decode failed")]
    result, engine = _run(paths, _failing(broken, broken, ["late"]))
    assert (result.done, result.left, result.exit_code) == (2, 0, 0)
    assert _answers(paths[1])["b"]["response"]["status_code"] == 200
    assert len(engine.requests) == 4


def test_temporary_failure_is_left_to_the_next_run(files, hasty):
    paths = files(_chat("a"), _chat("b"), _chat("c"))
    result, engine = _run(paths, _failing([DecodeError("llama_decode failed")]))
    assert (result.done, result.failed, result.left, result.exit_code) == (2, 0, 1, 1)
    assert "1 left (500 decode): run the same command to retry them" in result.human()
    assert set(_answers(paths[1])) == {"a", "c"}
    assert len(engine.requests) == 5
    result, engine = _run(paths)
    assert (result.done, result.skipped, result.left, result.exit_code) == (1, 2, 0, 0)
    assert set(_answers(paths[1])) == {"a", "b", "c"}


def test_a_run_in_which_nothing_is_answered_ends(files, hasty):
    paths = files(*(_chat(str(n)) for n in range(200)))
    result, engine = _run(paths, FakeEngine([[DecodeError("llama_decode failed")]]))
    assert (result.done, result.left) == (0, 200)
    assert len(engine.requests) < 100
    assert _answers(paths[1]) == {}


#: A run whose engine fails every third request. The 45th and later ones take argv[1] seconds.
_SHAKY = """
import sys
rest_s = float(sys.argv.pop(1))
sys.path[:0] = sys.argv.pop(1).split(":")
import test_batch as t
from edgeinfer.cli.verbs import batch
from edgeinfer.errors import DecodeError
from fake_engine import Delay, FakeEngine
t.batches._DEFECT_PAUSES_S = (0.0, 0.0)
def script(request):
    number = int(request.messages[-1].content)
    return [Delay(0.01 if number < 45 else rest_s), "fine" if number % 3 else DecodeError("broken")]
result = batch.run(t._options(*sys.argv[1:], "--quiet"), t.FakeHost(lambda model: FakeEngine(script)))
if result.output:
    print(result.done, result.left)
"""


def test_failures_and_a_kill_in_their_midst_lose_nothing(files, until):
    paths = files(*(_chat(str(n)) for n in range(90)))

    def words(rest_s: float) -> list[str]:
        path = ":".join([os.path.dirname(__file__), *sys.path])
        return [sys.executable, "-c", _SHAKY, str(rest_s), path, *map(str, paths)]

    def lines() -> int:
        return paths[1].read_bytes().count(b"\n") if paths[1].exists() else 0

    with subprocess.Popen(words(600.0), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        until(lambda: lines() >= 9 or process.poll() is not None, "some answers")
        process.kill()
    killed_at = lines()
    assert 9 <= killed_at < 60
    done = subprocess.run(words(0.0), capture_output=True, text=True, check=True)
    answered, n_missing = map(int, done.stdout.split())
    assert n_missing == 30
    assert answered in (60 - killed_at, 61 - killed_at)  # the last line may have been torn
    result, _ = _run(paths)
    assert (result.done, result.skipped, result.left) == (30, 60, 0)
    answers = _answers(paths[1])
    assert set(answers) == {str(n) for n in range(90)}
    assert {line["response"]["status_code"] for line in answers.values()} == {200}


def test_full_disk_ends_the_run_and_the_next_run_continues(files, monkeypatch):
    paths = files(*(_chat(str(n)) for n in range(6)))
    real_write, written = os.write, []

    def write(descriptor, data):
        if b"batch_" in bytes(data[:20]):
            written.append(1)
            if len(written) > 3:
                raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(DiskFullError):
        _run(paths)
    monkeypatch.undo()
    assert len(_answers(paths[1])) == 3
    result, _ = _run(paths)
    assert (result.done, result.skipped) == (3, 3)


def test_the_input_is_refused_as_output(tmp_path):
    requests = tmp_path / "requests.jsonl"
    requests.write_text('{"custom_id": "1"}\n')
    (tmp_path / "link.jsonl").hardlink_to(requests)
    for output in (requests, tmp_path / "link.jsonl"):
        with pytest.raises(UsageError, match="is both input and output"):
            batch.run(argparse.Namespace(input=str(requests), output=str(output)), EngineHost())
    assert requests.read_text() == '{"custom_id": "1"}\n'
