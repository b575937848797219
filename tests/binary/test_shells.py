"""Completion in the shells themselves."""

import shutil
import sys
from pathlib import Path

import pytest
from other_processes import run
from terminal import PROMPT, Terminal, shell_environment

BIN = Path(sys.executable).parent
TYPED = [
    ("edgeinfer quan", "quantize"),
    ("edgeinfer run --resu", "--resume"),
    ("edgeinfer run --resume ne", "never"),
    ("edgeinfer completion fi", "fish"),
    ("edgeinfer launch cod", "codex"),
    ("edgeinfer run smollm2-135", "smollm2-135m-instruct"),
    ("edgeinfer snapshots prune --al", "--all"),
    ("edgeinfer snapshots show my-", "my-snapshot"),
    ("edgeinfer run --snapshot my-", "my-snapshot"),
    ("edgeinfer run --lora my-", "my-adapter"),
]


def needs(shell):
    return pytest.mark.skipif(
        shutil.which(shell) is None, reason=f"{shell} is not installed: apt-get install {shell}"
    )


@pytest.fixture
def environment(tmp_path):
    snapshot = tmp_path / "ei/cache/snapshots/my-snapshot@1-program"
    snapshot.mkdir(parents=True)
    (snapshot / "manifest").touch()
    adapter = tmp_path / "ei/data/adapters/my-adapter.gguf"
    adapter.parent.mkdir(parents=True)
    adapter.touch()
    return {**shell_environment(tmp_path), "EDGEINFER_HOME": str(tmp_path / "ei")}


@needs("bash")
def test_bash_completes(environment):
    for typed, completions in TYPED:
        typed_words = typed.split()
        code = (
            f'eval "$(edgeinfer completion bash)"; COMP_WORDS=({typed}); COMP_CWORD={len(typed_words) - 1}; '
            'IFS=" "; _edgeinfer; echo "${COMPREPLY[@]}"'
        )
        done = run("bash", "--norc", "-c", code, env=environment)
        assert (done.stdout.strip(), done.stderr) == (completions, "")


@needs("fish")
def test_fish_completes(environment, tmp_path):
    script = tmp_path / "edgeinfer.fish"
    script.write_text(run(BIN / "edgeinfer", "completion", "fish", env=environment).stdout)
    for typed, completions in TYPED:
        code = f"source {script}; complete -C '{typed}'"
        done = run("fish", "--no-config", "-c", code, env=environment)
        assert done.stdout.split("\n")[0].split("\t")[0] == completions, typed
        assert done.stderr == ""


@needs("zsh")
@needs("tmux")
def test_zsh_completes(environment, tmp_path):
    terminal = Terminal(tmp_path, environment)
    try:
        terminal.run(f"PS1='{PROMPT}' exec zsh -f -i")
        terminal.run(
            'autoload -U compinit && compinit -u -D; eval "$(edgeinfer completion zsh)"; echo '
            "so$((40+2))"
        )
        terminal.until_shown("so42")
        for typed, completions in TYPED:
            line = f"{typed.rsplit(' ', 1)[0]} {completions}"
            terminal.press("C-u")
            terminal.type(typed)
            terminal.press("Tab")
            terminal.until(lambda line=line: terminal.screen().rstrip().endswith(line))
    finally:
        terminal.close()
