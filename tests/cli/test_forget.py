"""`edgeinfer forget` deletes blocks on disk, and nothing else."""

from pathlib import Path

from made_gguf import gguf_bytes

from edgeinfer.cli.main import main
from edgeinfer.platform import paths
from edgeinfer.runtime.options import ModelFiles
from edgeinfer.runtime.prefix_cache.block_folder import BlockStore
from edgeinfer.runtime.prefix_cache.kv_block import Header, KvBlock, model_key, pack_tokens
from edgeinfer.runtime.prefix_cache.retention import CacheLimits, list_blocks
from edgeinfer.runtime.sequence_state import as_state


def keep(model: str) -> None:
    """Store one block of `model` in the user's prefix cache."""
    limits = CacheLimits(max_bytes=1 << 20, margin_bytes=0)
    blocks = BlockStore(paths.blocks_dir(), limits).open_folder(model, {})
    parent = blocks.names.root()
    name = blocks.names.full(parent, [1])
    header = Header("full", name, parent, blocks.names.identity, pack_tokens([1]), ())
    blocks.write(KvBlock(header, (as_state(memoryview(b"text")),)))
    blocks.add_owner("talk", [name])
    assert blocks.close()


def test_blocks_of_a_model_are_deleted_and_others_stay(tmp_path: Path, capsys, monkeypatch) -> None:
    gguf = tmp_path / "some.gguf"
    gguf.write_bytes(b"GGUF")
    keep(model_key("", [str(gguf)]))
    keep("another")
    monkeypatch.setattr(
        "edgeinfer.host.EngineHost.files", lambda self, name: ModelFiles(name=name, paths=(str(gguf),))
    )
    assert main(["forget", str(gguf)]) == 0
    assert "freed" in capsys.readouterr().out
    assert len(list_blocks(paths.blocks_dir())) == 1


def test_no_block_is_deleted_if_one_of_several_models_is_unknown(tmp_path: Path) -> None:
    gguf = tmp_path / "some.gguf"
    gguf.write_bytes(gguf_bytes())
    keep(model_key("", [str(gguf)]))
    assert main(["forget", str(gguf), "nosuch"]) == 3
    assert len(list_blocks(paths.blocks_dir())) == 1


def test_blocks_of_conversations_are_deleted(capsys) -> None:
    keep("one")
    assert main(["forget", "--conversation", "other"]) == 2
    assert "conversation 'other' has no cached prefixes of its own" in capsys.readouterr().err
    assert len(list_blocks(paths.blocks_dir())) == 1
    assert main(["forget", "--conversation", "talk"]) == 0
    assert list_blocks(paths.blocks_dir()) == []
    capsys.readouterr()


def test_a_conversation_without_prefixes_does_not_keep_the_others(capsys) -> None:
    keep("one")
    assert main(["forget", "--conversation", "nosuch", "--conversation", "talk"]) == 2
    assert "conversation 'nosuch' has no cached" in capsys.readouterr().err
    assert list_blocks(paths.blocks_dir()) == []


def test_all_deletes_every_block_and_no_name_is_an_error(capsys) -> None:
    keep("one")
    assert main(["forget"]) == 2
    assert main(["forget", "all", "--yes"]) == 0
    assert list_blocks(paths.blocks_dir()) == []
    assert main(["forget", "all", "--yes"]) == 0
    capsys.readouterr()
