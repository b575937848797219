"""Snapshots of embedding, reranking and hybrid models; failed builds are not repeated."""

import json
import os
import shutil

import msgspec
import pytest
from made_families import make_family
from made_models import MEAN, N_EMBD, RANK, make_bert
from made_projectors import IDEFICS3_TOKENS, copy_model, make_projector
from PIL import Image

pytestmark = pytest.mark.criu


@pytest.mark.parametrize(("kind", "pooling"), [("encoder", MEAN), ("ranker", RANK)])
def test_encoders_and_rerankers_are_warmed_with_a_canary_of_their_kind(user, place, kind, pooling):
    model = make_bert(place.folder / f"{kind}.gguf", pooling, head=pooling == RANK)
    user.run("pull", str(model), "--name", kind, "--in-place", "--quiet").check()
    user.run("warm", kind, "--quiet").check()
    once, again = (user.ask_resumed("canary", kind) for _ in range(2))
    assert once == again != b""
    canary = msgspec.msgpack.decode(once)
    if kind == "ranker":
        assert {type(number) for number in canary} == {float}
    else:
        assert {*map(len, canary)} == {N_EMBD}


def test_states_and_experts_are_resumed_too(user, place):
    """Resume a hybrid of attention, a recurrent state and a mixture of experts."""
    model = make_family(place.folder / "hybrid.gguf", "Jamba (a hybrid)")
    user.run("pull", str(model), "--name", "hybrid", "--in-place", "--quiet").check()
    asked = ("run", "hybrid", "The sea", *"--raw --ctx 256 --max-tokens 8 --temperature 0".split())
    cold = user.run(*asked, "--resume", "never").check()
    user.run("warm", "hybrid", "--ctx", "256", "--quiet").check()
    resumed = user.run(*asked, "--json").check()
    told = json.loads(resumed.out)["result"]
    assert told["start"]["how"] == "resumed"
    assert told["text"].strip() == cold.out.strip()


@pytest.mark.needs("encoder")
def test_a_projector_is_parked_and_reads_pictures_after_the_resume(user, abroad, place, smollm2):
    model = copy_model(place.folder / "sees.gguf", smollm2, IDEFICS3_TOKENS)
    path = place.folder / "mmproj-sees.gguf"
    projector = make_projector(path, "idefics3", 576, patch=32, longest=512)
    picture = place.folder / "picture.png"
    Image.linear_gradient("L").convert("RGB").save(picture)
    user.run("pull", str(model), "--name", "sees", "--in-place", "--quiet").check()
    options = "--max-tokens 8 --temperature 0 --json".split()
    question = ("What is it?", "--image", str(picture), *options)
    cold = user.run("run", "sees", *question, "--resume=never").check()
    user.run("warm", "sees", "--quiet").check()
    resumed = user.run("run", "sees", *question).check()
    assert resumed.start["how"] == "resumed"
    assert resumed.result["text"] == cold.result["text"] != ""
    exported = user.home / "exported"
    user.run("snapshots", "export", "sees", str(exported), "--quiet").check()
    signer = user.run("snapshots", "trust", "--json").result["own"]
    abroad.run("snapshots", "trust", signer).check()
    importing = ("import", str(exported), "--quiet")
    abroad.run("snapshots", *importing).check()
    travelled = abroad.run("run", "sees", *question).check()
    assert travelled.start["how"] == "resumed"
    assert travelled.result["text"] == cold.result["text"]
    abroad.run("rm", "sees", "--yes").check()
    abroad.run("pull", str(model), "--name", "seeing", "--quiet").check()
    abroad.run("snapshots", *importing).check()  # the model is here under another name
    assert abroad.run("run", "sees", *question).result["text"] == cold.result["text"]
    os.utime(projector)
    changed = user.run("run", "sees", *question).check()
    assert changed.start["how"] == "cold"
    assert projector.name in changed.err


SABOTAGE = """

def main():  # the last definition counts
    link = socket.socket(fileno=LINK_FD)
    messages.receive(link)
    messages.send(link, messages.Failed(error={"code": "dump", "message": "planted"}))
    os._exit(1)
"""


@pytest.mark.needs("time")
def test_a_build_that_failed_is_not_tried_again_until_something_changes(user, place):
    copy = place.folder / "failing"
    shutil.copytree(place.sources, copy, ignore=shutil.ignore_patterns("__pycache__"))
    park = copy / "edgeinfer/snapshots/parked.py"
    whole = park.read_text()
    before, main, after = whole.partition('\nif __name__ == "__main__":')
    park.write_text(before + SABOTAGE + main + after)
    program = {"env": {"PYTHONPATH": str(copy)}}

    assert user.ask(**program).start["how"] == "cold"
    user.logged("not built: planted")
    assert user.ask(**program).start["how"] == "cold"
    user.logged("its last build failed, and nothing has changed since: planted")
    assert "could not be built" in user.run("snapshots", **program).check().out
    told = user.run("doctor", "--json", **program).out
    assert "result" in json.loads(told), told
    checks = json.loads(told)["result"]["checks"]
    assert any("small could not be built: planted" in check["found"] for check in checks)
    assert "could not be built" not in user.run("snapshots").check().out

    park.write_text(whole)
    assert user.ask(**program).start["how"] == "cold"
    user.logged("built in")
    assert user.ask(**program).start["how"] == "resumed"
    assert "could not be built" not in user.run("snapshots", **program).check().out
