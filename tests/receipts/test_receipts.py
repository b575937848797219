"""Receipts of the real models: every answer's verifies, and none that was changed does."""

import argparse
import contextlib
import io
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from edgeinfer import error_text
from edgeinfer.cli.receipt_file import ReceiptFile
from edgeinfer.cli.verbs import verify as verb
from edgeinfer.cli.verbs.verify import Check, VerifyResult, add_arguments, describe, run
from edgeinfer.errors import ConfigError, EdgeInferError, ReceiptError, UsageError
from edgeinfer.platform.ed25519 import SigningKey
from edgeinfer.receipts import receipt as receipts
from edgeinfer.receipts.receipt import Content, Receipt, Refusal, make_receipt, sign, with_record
from edgeinfer.receipts.replies import TEXTS, Entry, Quote, find_receipts, read_replies
from edgeinfer.receipts.verify import ReceiptCheck, Verification
from edgeinfer.runtime.engine import LlamaEngine, load_engine
from edgeinfer.runtime.events import Finished
from edgeinfer.runtime.options import Adapter, LoadOptions, ModelFiles
from edgeinfer.runtime.requests import (
    Choice,
    GenerateRequest,
    Grammar,
    JsonSchema,
    Message,
    Sampling,
    Tool,
    ToolChoice,
)

from ..runtime.conftest import GREEDY, answers, collect
from .example import EXAMPLE, FINISHED, INFO

_QUESTION = (Message(role="user", content="Tell me about ships and the sea, as a list."),)
_SAMPLED = Sampling(temperature=0.9, seed=11)
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 30}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_TOOL = Tool(name="weather", parameters={"type": "object", "properties": {"city": {"type": "string"}}})
_PENALTIES = Sampling(
    temperature=0.7,
    seed=5,
    min_p=0.02,
    top_k=0,
    repeat_penalty=1.2,
    repeat_last_n=-1,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    dry_multiplier=0.8,
    logit_bias={260: 2.0, 28: -3.0},
)
#: What an answer may be asked with.
_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"sampling": GREEDY},
    "sampled": {},
    "cut by length": {"ignore_eos": True, "max_tokens": 60},
    "penalties": {"sampling": _PENALTIES, "max_tokens": 60},
    "schema": {"constraint": JsonSchema(_SCHEMA), "max_tokens": 80},
    "grammar": {"constraint": Grammar('root ::= ("a" | "b" | "ship ")+ "."'), "max_tokens": 30},
    "choice": {"constraint": Choice(("red sails", "green sails"))},
    "tools": {"tools": (_TOOL,), "tool_choice": ToolChoice(mode="required"), "max_tokens": 80},
    "stop strings": {"stop": (" the", "2"), "max_tokens": 60},
    "drafts": {"speculative": "ngram", "sampling": GREEDY, "ignore_eos": True, "max_tokens": 90},
    "log-probabilities": {"logprobs": 2, "constraint": JsonSchema(_SCHEMA), "max_tokens": 40},
    "from the cache": {"cache_prompt": True},
}
Engines = dict[str, LlamaEngine]


def _load(path: Path) -> LlamaEngine:
    files = ModelFiles(name=path.stem, paths=(str(path),), sha256=f"{path.stat().st_size:064x}")
    return load_engine(files, LoadOptions(n_ctx=2048, n_parallel=8))


@pytest.fixture(scope="module")
def engines(smollm2: Path, gemma3: Path) -> Iterator[Engines]:
    with closing(_load(smollm2)) as smol, closing(_load(gemma3)) as gemma:
        yield {"smollm2": smol, "gemma3": gemma}


def _request(kind: str = "sampled", **fields: Any) -> GenerateRequest:
    asked = {"sampling": _SAMPLED, "max_tokens": 40, "messages": _QUESTION, **_KINDS[kind], **fields}
    return with_record(GenerateRequest(**asked))


def verify(
    receipt: Receipt, engine: LlamaEngine, quotes: Sequence[Quote] | None = None
) -> Verification:
    return ReceiptCheck(receipt, engine, quotes).run()


def _receipts(engine: LlamaEngine, *requests: GenerateRequest) -> list[Receipt]:
    """Ask all at once, which batches them."""
    pairs = zip(requests, answers(engine, requests), strict=True)
    outcomes = [make_receipt(request, answer.finish, engine.info) for request, answer in pairs]
    assert not [entry for entry in outcomes if isinstance(entry, Refusal)]
    return [entry for entry in outcomes if isinstance(entry, Receipt)]


def _through_json(receipt: Receipt) -> Receipt:
    """As another program would hand it on: parsed, and written with other white space."""
    return _parse(json.dumps(json.loads(msgspec.json.encode(receipt)), indent=1).encode())


def _parse(text: bytes) -> Receipt:
    return receipts.to_receipt(receipts.parse_json(text))


def _forge(receipt: Receipt, **content: Any) -> Receipt:
    """Change the content, and all digests with it, as a forger would."""
    assert receipt.content is not None
    changed = replace(receipt.content, **content)
    raw = receipts._sha256(changed)
    receipt = replace(receipt, content=changed, content_sha256=raw)
    return replace(receipt, sha256=receipt.digest())


def _content(receipt: Receipt) -> Content:
    assert receipt.content is not None
    return receipt.content


@pytest.mark.model
@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
@pytest.mark.parametrize("kind", _KINDS)
def test_every_kind_of_answer_verifies_and_with_another_token_it_does_not(
    engines: Engines, model: str, kind: str
) -> None:
    engine = engines[model]
    (receipt,) = _receipts(engine, _request(kind))
    result = verify(_through_json(receipt), engine)
    assert (result.verdict, result.reason) == ("verified", "")
    assert result.n_answer == receipt.n_answer > 0

    answer = _content(receipt).answer
    for position in {0, len(answer) // 2, len(answer) - 1}:
        other = (answer[position] + 1) % engine.info.n_vocab
        forged = _forge(receipt, answer=(*answer[:position], other, *answer[position + 1 :]))
        result = verify(forged, engine)
        assert (result.verdict, result.position) == ("differs", position), result.reason
        assert result.reason == f"token {position + 1} of {len(answer)} differs"
        assert result.expected is not None
        assert result.chosen is not None
        assert (result.expected.id, result.chosen.id) == (other, answer[position])


@pytest.mark.model
def test_copies_of_a_batch_and_an_answer_from_the_cache_verify(engines: Engines) -> None:
    engine = engines["smollm2"]
    four = [_request(sampling=replace(_SAMPLED, seed=seed)) for seed in range(4)]
    all_receipts = _receipts(engine, *four) + _receipts(engine, four[0])
    assert len({_content(receipt).answer for receipt in all_receipts}) == 4
    assert [verify(receipt, engine).verdict for receipt in all_receipts] == ["verified"] * 5


@pytest.mark.model
def test_a_check_computes_prompt_and_answer_in_one_step(engines: Engines) -> None:
    engine = engines["smollm2"]
    (receipt,) = _receipts(engine, _request("cut by length"))
    n_steps = engine.metrics().steps_total
    assert verify(receipt, engine).verdict == "verified"
    assert engine.metrics().steps_total == n_steps + 1


@pytest.mark.model
def test_checks_next_to_an_answer_verify_and_do_not_change_it(engines: Engines) -> None:
    engine = engines["smollm2"]
    checked = _receipts(engine, *map(_request, ("sampled", "schema", "stop strings", "cut by length")))
    long = _request(ignore_eos=True, max_tokens=150)
    (alone,) = answers(engine, [long])
    with ThreadPoolExecutor() as pool:
        generation = engine.submit(long)
        verdicts = pool.map(lambda receipt: verify(receipt, engine).verdict, checked)
        assert collect(generation).text == alone.text
        assert set(verdicts) == {"verified"}


@pytest.mark.model
def test_a_cancelled_answer_verifies_as_far_as_it_goes(engines: Engines) -> None:
    engine = engines["smollm2"]
    request = _request(ignore_eos=True, max_tokens=1500)
    generation = engine.submit(request)
    events = iter(generation)
    while (event := next(events)).__class__.__name__ != "TextDelta":
        assert not isinstance(event, Finished)
    generation.cancel()
    receipt = make_receipt(request, collect(events).finish, engine.info)
    assert isinstance(receipt, Receipt)
    assert receipt.finish_reason == "cancelled"
    assert verify(receipt, engine).verdict == "verified"


@pytest.mark.model
def test_a_seed_is_drawn_and_recorded(engines: Engines) -> None:
    engine = engines["smollm2"]
    all_receipts = _receipts(engine, *(_request(sampling=Sampling(temperature=1.0)) for _ in range(2)))
    assert all_receipts[0].sampling.seed != all_receipts[1].sampling.seed
    assert [verify(receipt, engine).verdict for receipt in all_receipts] == ["verified"] * 2


@pytest.mark.model
def test_a_longer_a_shorter_and_another_ending_differ(engines: Engines) -> None:
    engine = engines["smollm2"]
    (cut,) = _receipts(engine, _request("cut by length"))
    answer = _content(cut).answer
    few = {"answer": answer[:30], "logprobs": _content(cut).logprobs[:30]}
    shorter = _forge(replace(cut, n_answer=30), **few)
    assert "not cut off by length" in verify(shorter, engine).reason
    stopped_early = _forge(replace(cut, n_answer=30, finish_reason="stop"), **few)
    assert "continues" in verify(stopped_early, engine).reason
    (stopped,) = _receipts(engine, _request("stop strings"))
    assert stopped.finish_reason == "stop"
    for change in ({"stop_sequence": None}, {"stop_sequence": "sea"}):
        assert verify(_forge(stopped, **change), engine).verdict == "differs"
    no_stop = {**_content(stopped).request}
    del no_stop["stop"]
    assert verify(_forge(stopped, request=no_stop), engine).verdict == "differs"


@pytest.mark.model
def test_another_seed_or_option_differs(engines: Engines) -> None:
    engine = engines["smollm2"]
    (receipt,) = _receipts(engine, _request("penalties"))
    for change in ({"seed": 6}, {"temperature": 1.4}, {"repeat_penalty": 3.0}, {"logit_bias": {}}):
        sampling = replace(receipt.sampling, **change)
        forged = _forge(replace(receipt, sampling=sampling))
        assert verify(forged, engine).verdict == "differs", change


@pytest.mark.model
def test_each_changed_field_of_a_receipt_is_noticed(engines: Engines) -> None:
    engine = engines["smollm2"]
    key = SigningKey(b"k" * 32)
    receipt = sign(_receipts(engine, _request())[0], key)
    assert verify(receipt, engine).signer == key.fingerprint
    document = json.loads(msgspec.json.encode(receipt))
    for field, changed in _changes(document, random.Random(7)):
        # an unsigned receipt is one, and a default may be left out
        if re.fullmatch(r"(sampling\..*|signature|content.stop_sequence) left out", field):
            continue
        verdict = "differs"
        with contextlib.suppress(EdgeInferError):
            verdict = verify(receipts.to_receipt(changed), engine).verdict
        assert verdict == "differs", field
    # a forger can compute digests, and not the signature
    forged = replace(receipt, model="qwen3-4b")
    forged = replace(forged, sha256=forged.digest())
    assert "signature" in verify(forged, engine).reason


def _changes(value: Any, dice: random.Random, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the document with a value changed or left out: each one, and of a list three at most."""
    if isinstance(value, dict):
        for key, field in value.items():
            inner = f"{path}.{key}".removeprefix(".")
            yield f"{inner} left out", {name: other for name, other in value.items() if name != key}
            for name, changed in _changes(field, dice, inner):
                yield name, {**value, key: changed}
    elif isinstance(value, list):
        for i in dice.sample(range(len(value)), min(3, len(value))):
            for name, changed in _changes(value[i], dice, path):
                yield name, [*value[:i], changed, *value[i + 1 :]]
    else:
        yield path, _other(value)


def _other(value: Any) -> Any:
    if isinstance(value, str):
        return value[:-1] + ("1" if value[-1:] == "0" else "0")
    return not value if isinstance(value, bool) else (value or 0) + 1


#: Fields that change no token, so that only a signature vouches for them (docs/guides/receipts.md);
#: digests, which a forger computes again; and options that may give the same tokens.
_UNCHECKED = (
    "program model time index seconds content_sha256 sha256 n_ctx sampling content.salt "
    "content.request.max_tokens content.request.stop content.request.ignore_eos "
    "content.request.messages.reasoning content.request.messages.tool_call_id "
    "content.request.messages.name"
).split()


@pytest.mark.model
@pytest.mark.parametrize("kind", ["cut by length", "schema", "tools", "stop strings", "grammar"])
def test_a_forger_who_computes_the_digests_again_is_noticed(
    engines: Engines, kind: str, cases: Callable[[int], int]
) -> None:
    engine, dice = engines["smollm2"], random.Random(kind)
    (receipt,) = _receipts(engine, _request(kind))
    document = json.loads(msgspec.json.encode(receipt))
    paths = set()
    for name, changed in (pair for _ in range(cases(2)) for pair in _changes(document, dice)):
        path = name.partition(" ")[0]
        if path == "content" or any(f"{path}.".startswith(f"{field}.") for field in _UNCHECKED):
            continue
        verdict = "refused"
        with contextlib.suppress(EdgeInferError):
            verdict = verify(_forge(receipts.to_receipt(changed)), engine).verdict
        assert verdict in ("refused", "differs"), name
        paths.add(path)
    assert {"content.prompt", "content.answer", "content.logprobs", "model_sha256"} < paths


@pytest.mark.model
def test_a_verdict_says_what_an_unsigned_receipt_does_not_show(engines: Engines) -> None:
    engine = engines["smollm2"]
    (receipt,) = _receipts(engine, _request())
    forged = _forge(replace(receipt, program="9.9", seconds=0.0))
    for checked, n_notes in ((forged, 1), (sign(receipt, SigningKey(b"k" * 32)), 0)):
        fields = msgspec.structs.asdict(verify(checked, engine))
        check = Check(source="a", **fields)
        assert (check.verdict, len(check.notes)) == ("verified", n_notes)
        for n_receipts in (1, 2):
            result = VerifyResult(checks=(check,), n_receipts=n_receipts)
            assert ("does not show who answered" in result.human()) == bool(n_notes)
            assert not result.human().startswith("1 of them")


@pytest.mark.model
def test_a_private_receipt_tells_nothing_and_verifies_with_its_content(
    engines: Engines, tmp_path: Path
) -> None:
    engine = engines["smollm2"]
    whole = sign(_receipts(engine, _request())[0], SigningKey(b"k" * 32))
    private = _through_json(replace(whole, content=None))
    assert b"ships" not in msgspec.json.encode(private)
    with pytest.raises(ReceiptError, match="private"):
        verify(private, engine)
    (other,) = _receipts(engine, _request())
    assert other.content_sha256 != whole.content_sha256, "equal conversations have other salts"
    for name, receipt in (("whole", whole), ("other", other), ("private", private)):
        (tmp_path / name).write_bytes(msgspec.json.encode(receipt))
    completed = verb._with_content(private, str(tmp_path / "whole"))
    assert verify(completed, engine).verdict == "verified"
    for name in ("other", "private"):
        with pytest.raises(ReceiptError, match="does not belong"):
            verb._with_content(private, str(tmp_path / name))


@pytest.mark.model
def test_another_kernel_revision_is_checked_within_a_tolerance(engines: Engines) -> None:
    engine = engines["smollm2"]
    (receipt,) = _receipts(engine, _request("schema"))
    old = _forge(replace(receipt, kernel_revision=0))
    result = verify(old, engine)
    assert (result.verdict, result.most_difference) == ("within tolerance", pytest.approx(0, abs=1e-3))
    answer = _content(old).answer
    result = verify(_forge(old, answer=(answer[1], *answer[1:])), engine)
    assert result.verdict == "differs"
    assert result.most_difference is not None
    assert result.most_difference > 2


@pytest.mark.model
def test_another_model_differs_and_another_cache_type_is_refused(engines: Engines) -> None:
    (receipt,) = _receipts(engines["smollm2"], _request())
    assert "another digest" in verify(receipt, engines["gemma3"]).reason
    with pytest.raises(ReceiptError, match="q8_0"):
        verify(_forge(replace(receipt, kv_type="q8_0")), engines["smollm2"])


@pytest.mark.model
def test_hostile_receipts_are_refused_in_words(engines: Engines) -> None:
    engine = engines["smollm2"]
    (receipt,) = _receipts(engine, _request())
    bomb: dict[str, Any] = {"type": "string", "pattern": "(a{1,9999}){1,9999}(b{1,9999}){1,9999}"}
    deep: dict[str, Any] = {}
    for _ in range(900):
        deep = {"type": "array", "items": deep}
    for schema in (bomb, deep):
        request = {**_content(receipt).request, "constraint": {"type": "json_schema", "schema": schema}}
        with contextlib.suppress(EdgeInferError):
            assert verify(_forge(receipt, request=request), engine).verdict == "differs"
    for tokens, message in (((2_000_000,), "vocabulary"), ((1,) * 5000, "context")):
        forged = replace(receipt, n_answer=len(tokens))
        with pytest.raises(ReceiptError, match=message):
            verify(_forge(forged, answer=tokens), engine)
    for request in ({"messages": 5}, {"prompt": "a", "infill": {}}, {"replay": {"answer": []}}, {}):
        with contextlib.suppress(EdgeInferError):
            forged = _through_json(_forge(receipt, request=request))
            assert verify(forged, engine).verdict == "differs"


_WRONG = {
    "no JSON": b"\xff\xfe{",
    "another document": b'{"a": 1}',
    "a list": b"[]",
    "a key twice": b'{"version": 1, "version": 1}',
    "NaN": b'{"version": NaN}',
    "deep": b"[" * 100_000,
    "deep objects": b'{"a":' * 50_000,
    "a long number": b'{"version": ' + b"9" * 10_000 + b"}",
    "a number beyond 64 bits": b'{"version": 99999999999999999999999}',
    "too long": b" " * (receipts.MAX_BYTES + 1),
    "": b"",
}


@pytest.mark.parametrize("kind", _WRONG)
def test_what_is_no_receipt_is_refused_in_words(kind: str) -> None:
    with pytest.raises(ReceiptError) as caught:
        _parse(_WRONG[kind])
    assert len(caught.value.message) < 500


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(_JSON, st.data())
def test_a_receipt_with_anything_in_a_field_is_refused_or_altered(
    value: Any, data: st.DataObject
) -> None:
    document = json.loads(json.dumps(EXAMPLE))
    parent = document["content"] if data.draw(st.booleans()) else document
    field = data.draw(st.sampled_from(sorted(parent)))
    if parent[field] == value or (field in ("signature", "content") and value is None):
        return
    parent[field] = value
    try:
        receipt = receipts.to_receipt(document)
    except ReceiptError:
        return
    assert receipt.alteration() or receipt == receipts.to_receipt(EXAMPLE)


_FORGED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "an ignored field of the request": ({}, {"cache_salt": "x"}),
    "an unknown field of the request": ({}, {"judged": "true"}),
    "no revision": ({"kernel_revision": 900_000}, {}),
}


@pytest.mark.model
@pytest.mark.parametrize("kind", _FORGED)
def test_a_field_that_changes_no_token_cannot_be_forged(engines: Engines, kind: str) -> None:
    engine, (fields, asked) = engines["smollm2"], _FORGED[kind]
    (receipt,) = _receipts(engine, _request("schema"))
    request = {**_content(receipt).request, **asked}
    forged = _forge(replace(receipt, **fields), request=request)
    verdict = "differs"
    with contextlib.suppress(ReceiptError):
        verdict = verify(_through_json(forged), engine).verdict
    assert verdict == "differs"


@pytest.mark.model
def test_forged_names_and_log_probabilities_do_not_verify(engines: Engines) -> None:
    engine = engines["smollm2"]
    (receipt,) = _receipts(engine, _request())
    renamed = _forge(replace(receipt, model="gpt\x1b[2J"))
    assert verify(renamed, engine).model == engine.info.model
    first, *later = _content(receipt).logprobs
    assert first is not None
    assert "log-probability" in verify(_forge(receipt, logprobs=(first - 1, *later)), engine).reason
    for revision in (0, receipt.kernel_revision):
        old = replace(receipt, kernel_revision=revision)
        assert verify(_forge(old, logprobs=(None, *later)), engine).verdict == "differs"
    key = SigningKey(b"k" * 32)
    altered = replace(sign(receipt, key), model="other")
    assert (verify(altered, engine).verdict, verify(altered, engine).signer) == ("differs", "")
    document = json.loads(msgspec.json.encode(receipt))
    document["sampling"]["creativity"] = 11
    with pytest.raises(ReceiptError, match="creativity"):
        receipts.to_receipt(document)


def _beside(receipt: Receipt, text: str) -> dict[str, dict[str, Any]]:
    """Return each document that an answer with a receipt may stand in."""
    entry = json.loads(msgspec.json.encode(receipt))
    reply = {"choices": [{"index": 0, "message": {"content": text}}], "receipt": entry}
    return {
        "chat": reply,
        "completion": {"choices": [{"index": 0, "text": text}], "receipt": entry},
        "several": {"choices": [{"index": 0, "message": {"content": text}}], "receipts": [entry]},
        "batch": {"custom_id": "1", "response": {"body": reply}},
        "payload log": _log_line({"text": text, "receipt": entry}),
        "ollama": {"message": {"content": text}, "receipt": entry},
    }


@pytest.mark.model
def test_a_changed_answer_next_to_its_receipt_differs(engines: Engines) -> None:
    engine = engines["smollm2"]
    (receipt,) = _receipts(engine, _request())
    text = verify(receipt, engine).text
    assert text
    for changed, verdict in ((text, "verified"), (text + " Not.", "differs"), ("", "differs")):
        for kind, document in _beside(receipt, changed).items():
            [entry], _ = find_receipts([document])
            result = verify(receipts.to_receipt(entry.document), engine, entry.quotes)
            assert (result.verdict, bool(entry.quotes)) == (verdict, True), kind
    [entry], _ = find_receipts([{"usage": {}, "receipt": _beside(receipt, "")["chat"]["receipt"]}])
    assert entry.quotes == ()


@pytest.mark.model
def test_changed_tool_calls_next_to_a_receipt_differ(engines: Engines) -> None:
    engine, request = engines["smollm2"], _request("tools")
    (answer,) = answers(engine, [request])
    receipt = make_receipt(request, answer.finish, engine.info)
    assert isinstance(receipt, Receipt)
    (call,) = answer.calls.values()
    for arguments, verdict in ((call.arguments, "verified"), ("{}", "differs")):
        function = {"name": call.name, "arguments": arguments}
        message = {"content": None, "tool_calls": [{"function": function}]}
        raw = json.loads(msgspec.json.encode(receipt))
        reply = {"choices": [{"index": 0, "message": message}], "receipt": raw}
        [entry], _ = find_receipts([reply])
        assert entry.quotes
        result = verify(receipt, engine, entry.quotes)
        assert result.verdict == verdict, result.reason


@pytest.mark.model
def test_a_cut_answer_is_named_and_a_revision_has_its_exit_status(engines: Engines) -> None:
    engine = engines["smollm2"]
    (receipt,) = _receipts(engine, _request("cut by length"))
    content = _content(receipt)
    few = {"answer": content.answer[:5], "logprobs": content.logprobs[:5]}
    cut = _forge(replace(receipt, finish_reason="cancelled", n_answer=5), **few)
    [line, *_] = describe(verify(cut, engine))
    assert "the first 5 tokens of an answer that was cancelled" in line
    old = _forge(replace(receipt, kernel_revision=0))
    results = (msgspec.structs.asdict(verify(checked, engine)) for checked in (old, receipt))
    checks = tuple(Check(source="a", **result) for result in results)
    statuses = [VerifyResult(checks=checks[n:], n_receipts=2).exit_code for n in (0, 1)]
    assert statuses == [9, 0]
    torn = Check(source="c", verdict="not checked", reason="torn")
    assert VerifyResult(checks=(*checks, torn), n_receipts=2).exit_code == 5


def _log_line(*answers: dict[str, Any]) -> dict[str, Any]:
    kind = "io.edgeinfer.generation"
    return {"specversion": "1.0", "type": kind, "data": {"answers": list(answers)}}


def _run(*arguments: object) -> VerifyResult:
    """Run the verb in this process."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([*map(str, arguments)]), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("n_receipts", [1, 2, 5, 40])
def test_a_sample_has_at_least_one_receipt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_receipts: int
) -> None:
    counts = dict.fromkeys(("kernel_revision", "n_prompt", "n_answer", "generation_seconds"), 1)
    verified = Verification(verdict="verified", model="m", finish_reason="stop", **counts)

    def run(check: ReceiptCheck) -> Verification:
        check.lacks_text = False
        return verified

    monkeypatch.setattr(ReceiptCheck, "run", run)
    monkeypatch.setattr(verb, "_load", lambda *_arguments: io.BytesIO())  # it can be closed
    line = json.dumps(_log_line({"text": "a", "receipt": EXAMPLE}, {"text": "b"}))
    (tmp_path / "a.jsonl").write_text(f"{line}\n" * n_receipts)
    result = _run("--log", tmp_path, "--sample", "0.001%")
    assert (len(result.checks), result.n_receipts, result.exit_code) == (1, n_receipts, 0)
    assert result.without_receipt == n_receipts
    assert f"checked 1 of {n_receipts} receipts: 1 verified" in result.human() or n_receipts == 1
    whole = _run("--log", tmp_path, "--sample", "100%")
    assert len(whole.checks) == n_receipts


def test_a_log_without_a_receipt_has_its_own_exit_status(tmp_path: Path) -> None:
    assert "log is empty" in _run("--log", tmp_path).human()
    (tmp_path / "a.jsonl").write_text("")
    result = _run("--log", tmp_path)
    assert (result.exit_code, "log is empty" in result.human()) == (10, True)
    (tmp_path / "a.jsonl").write_text(json.dumps(_log_line({"text": "b"})))
    result = _run("--log", tmp_path)
    assert (result.exit_code, "1 answer has no receipt" in result.human()) == (10, True)


def test_a_torn_a_blank_and_an_odd_line_end_no_check(tmp_path: Path) -> None:
    odd = [b"{", b"", b"[1]", b"5", b'{"data": 5}', b'{"data": {"answers": 7}}', b'{"receipts": 3}']
    odd += [b'{"choices": 4, "receipt": 6}', b'{"receipt": {"content_sha256": []}}']
    deep = (b'{"type": ' + b"[" * 900 + b"]" * 900 + b"}", b'{"message": ' * 400 + b"{}" + b"}" * 400)
    odd += [*deep, b'{"torn":']
    log = tmp_path / "a.jsonl"
    log.write_bytes(b"\n".join(odd))
    result = _run(log)
    lines = [check.source.rpartition(":")[2] for check in result.checks]
    assert {"1", "3", "12", "7", "8", "9"} <= {*lines}
    assert {check.verdict for check in result.checks} == {"not checked"}
    assert result.exit_code == 5


def test_a_damaged_receipt_of_a_log_is_not_checked(tmp_path: Path) -> None:
    damaged = {name: field for name, field in EXAMPLE.items() if name != "content_sha256"}
    receipts = [damaged, {}, "x", {"refused": "no", "version": 1}, {"refused": "no"}, None]
    lines = [json.dumps(_log_line({"text": "a", "receipt": receipt})) for receipt in receipts]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    result = _run("--log", tmp_path)
    assert [check.verdict for check in result.checks] == ["not checked"] * 4
    assert (result.exit_code, result.without_receipt) == (5, 2)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"Buy milk\n", "the text is not JSON (line 1, column 1)"),
        (b'{\n "a": 1,\n]', "the text is not JSON (line 3, column 1)"),
        (b"\x7fELF\xff\n\xfe", "the file is not UTF-8 text"),
    ],
)
def test_a_file_that_is_no_receipt_is_named(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "notes.txt").write_bytes(content)
    with pytest.raises(ReceiptError) as refused:
        _run(tmp_path / "notes.txt")
    assert refused.value.message == f"{tmp_path}/notes.txt: this is not a receipt: {problem}"
    assert "`edgeinfer run --receipt FILE` writes one" in error_text.hint(refused.value)


@pytest.mark.parametrize("indent", [None, 1])
def test_a_list_is_the_answers_to_several_prompts_or_refused(indent: int | None) -> None:
    answers = [{"index": n, "content": text, "stop": True} for n, text in enumerate("xy")]
    answers[-1]["receipts"] = [EXAMPLE, EXAMPLE]
    [(entries, n_answers)] = _find(json.dumps(answers, indent=indent))
    assert (list(map(_texts, entries)), n_answers) == ([["x"], ["y"]], 2)
    replies = [{"content": text, "receipt": EXAMPLE} for text in "xy"]
    for several in (replies, [EXAMPLE, EXAMPLE], [{"done": False}, EXAMPLE], []):
        text = json.dumps(several, indent=indent).encode()
        [(_, error)] = read_replies(io.BytesIO(text), "replies")
        assert "jq" in str(error)


def test_an_answer_next_to_one_with_a_receipt_is_counted() -> None:
    choices = [{"index": n, "message": {"content": "x"}} for n in range(2)]
    [(entries, n_answers)] = _find(json.dumps({"choices": choices, "receipt": EXAMPLE}))
    assert (len(entries), n_answers) == (1, 2)


def test_a_failed_request_of_a_batch_or_log_has_no_answer() -> None:
    error = {"message": "too long", "type": "invalid_request_error", "param": None, "code": "c"}
    response = {"status_code": 400, "request_id": "r", "body": {"error": error}}
    line = {"id": "batch_r", "custom_id": "1", "response": response, "error": None}
    failed = _log_line()
    failed["data"]["error"] = {"code": "c", "message": "too long"}
    assert find_receipts([line]) == find_receipts([failed]) == ([], 0)


def test_only_a_receipt_itself_has_no_reply() -> None:
    body = {"choices": [{"index": 0, "text": "x"}], "receipt": EXAMPLE}
    batch = {"custom_id": "1", "content_sha256": "", "response": {"body": body}}
    for document in (body, batch):
        [([entry], _)] = _find(json.dumps(document))
        assert _texts(entry) == ["x"]
    [([entry], _)] = _find(json.dumps({"usage": {}, "receipt": EXAMPLE}))
    assert entry.quotes == ()
    [([entry], _)] = _find(json.dumps(EXAMPLE))
    assert entry.quotes is None


def test_blank_lines_and_fields_of_events_are_skipped() -> None:
    reply = {"content": "x", "receipt": EXAMPLE}
    [([entry], _)] = _find("\n \n" + json.dumps(reply, indent=1))
    assert _texts(entry) == ["x"]
    [([entry], _)] = _find(f"retry: 10\nid: 7\nevent:\ndata: {json.dumps(reply)}\n\n")
    assert entry.source == "reply:4"


def _texts(entry: Entry) -> list[str]:
    """Return the text of an answer at each place of its reply."""
    copies = [parts for quote in entry.quotes or () for parts in quote.copies.values()]
    texts = [texts for parts in copies for p, texts in parts.items() if p in TEXTS]
    return ["".join(map("".join, pieces.values())) for pieces in texts]


def _find(text: str) -> list[tuple[list[Entry], int]]:
    replies = read_replies(io.BytesIO(text.encode()), "reply")
    return [find_receipts(documents, source) for source, documents in replies]  # type: ignore[arg-type]


def test_a_receipt_has_the_adapters_that_the_engine_loaded() -> None:
    """Neither their files nor those of the same names are looked at after the answer."""
    used = (Adapter("a", "/nowhere/a.gguf", 0.5, "ab" * 32),)
    assert FINISHED.record is not None
    finished = replace(FINISHED, record=replace(FINISHED.record, adapters=used))
    info = replace(INFO, lora=(Adapter("a", "/elsewhere", 1.0, "cd" * 32),))
    receipt = make_receipt(with_record(GenerateRequest(prompt="a b")), finished, info)
    assert isinstance(receipt, Receipt)
    assert [(a.name, a.scale, a.sha256) for a in receipt.adapters] == [("a", 0.5, "ab" * 32)]


def test_a_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "key.pem"
    file.write_text("x")
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="other users"):
        receipts.load_key(str(file))


def test_a_receipt_goes_into_a_fifo_and_a_file_of_its_owner_s(tmp_path: Path) -> None:
    fifo, file = tmp_path / "fifo", tmp_path / "file"
    os.mkfifo(fifo)
    receipt = receipts.to_receipt(EXAMPLE)
    with ThreadPoolExecutor() as pool:
        read = pool.submit(fifo.read_bytes)
        ReceiptFile(fifo).write(receipt, is_private=False)
        assert _parse(read.result()) == receipt
    assert fifo.is_fifo()
    ReceiptFile(file).write(receipt, is_private=False)
    assert file.stat().st_mode & 0o777 == 0o600
    for path, problem in ((tmp_path / "none/file", "there is no folder"), (tmp_path, "is a folder")):
        with pytest.raises(UsageError, match=problem):
            ReceiptFile.parse(str(path))
    with pytest.raises(UsageError, match="must be an ordinary file"):
        ReceiptFile(fifo).record(GenerateRequest(prompt="a"), is_private=True)


@pytest.mark.model
def test_the_command_line_writes_and_another_process_verifies(smollm2: Path, tmp_path: Path) -> None:
    models = Path(os.environ["EDGEINFER_HOME"]) / "data/models"
    models.parent.mkdir(parents=True)
    models.symlink_to(smollm2.parents[1])
    model = smollm2.parent.name

    def edgeinfer(*arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "edgeinfer", *map(str, arguments), "--ctx", "1024"]
        return subprocess.run(command, input=stdin or None, capture_output=True, text=True, check=False)

    file, question = tmp_path / "receipt.json", "Name three sails of a ship."
    asked = ("run", model, question, "--max-tokens", 30, "--seed", 4, "--temperature", 0.9)
    written = edgeinfer(*asked, "--receipt", file, "--private")
    assert written.returncode == 0
    assert f"edgeinfer verify {file} --content {file}.content" in written.stderr
    content = tmp_path / "receipt.json.content"
    assert (file.stat().st_mode & 0o777, content.stat().st_mode & 0o777) == (0o644, 0o600)
    refused = edgeinfer("verify", file)
    assert (refused.returncode, "private" in refused.stderr) == (5, True)
    checked = edgeinfer("verify", file, "--content", content)
    assert (checked.returncode, checked.stdout[:9]) == (0, "verified:"), checked.stderr
    both = edgeinfer("verify", file, content, "--content", content)
    assert (both.returncode, both.stdout.count(":1: verified: ")) == (0, 2), both.stderr
    assert edgeinfer("verify", content, tmp_path / "none").returncode == 5

    document = json.loads(content.read_bytes())
    document["content"]["answer"][5] += 1
    content.write_text(json.dumps(document))
    altered = edgeinfer("verify", content)
    assert (altered.returncode, "was changed" in altered.stdout) == (1, True)
    receipt = json.loads(edgeinfer(*asked, "--receipt", "/dev/stdout").stdout.splitlines()[-1])
    text = json.loads(edgeinfer(*asked, "--json").stdout)["result"]["text"]
    for answer, status in ((text, 0), (text.replace(text[-1], "?"), 1)):
        choice = {"index": 0, "delta": {"content": answer}}
        events = ({"choices": [choice]}, {"receipt": receipt})
        stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        checked = edgeinfer("verify", "-", stdin=stream)
        assert (checked.returncode, "whole text" in checked.stdout) == (status, False), checked.stderr
    file.write_text("{}")
    assert edgeinfer("verify", file).returncode == 5
