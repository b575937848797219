"""`llm`: its own command, with a model in its configuration and a function as a tool; then -c."""

import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

url, model = sys.argv[1:]
home = Path(tempfile.mkdtemp())
(home / "extra-openai-models.yaml").write_text(
    f"- model_id: local\n  model_name: {model}\n  api_base: {url}/v1\n  api_key_name: none\n  supports_tools: true\n"
)
command = [str(Path(sys.executable).with_name("llm")), "-m", "local", "--key", "none"]
function = (
    "def get_weather(city: str) -> str:\n    'The weather in a city.'\n    return 'sunny in ' + city\n"
)
environment = {**os.environ, "LLM_USER_PATH": str(home)}


def ask(*arguments: str) -> str:
    done = subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


assert "The tool has done it." in ask("--functions", function, "What is the weather in Paris?")
assert "second turn" in ask("-c", "--functions", function, "And now?")
print(version("llm"))
