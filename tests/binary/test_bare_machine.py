"""The shipped file on a machine that has libc and nothing else."""

import http.server
import re
import shutil
import signal
import ssl
import subprocess
import threading

import httpx2
import pexpect
import pytest

from .conftest import MODEL
from .test_first_start import wait_for_port

ASK = ("run", MODEL, "Name three colours.", "--max-tokens", "6", "--temperature", "0")


@pytest.fixture(scope="module")
def https(tmp_path_factory, smollm2):
    """An https server with a certificate of its own that serves the small model; its URL and the
    certificate.
    """
    folder = tmp_path_factory.mktemp("https")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    keys = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout key.pem -out cert.pem"
    command = ["openssl", "req", "-x509", "-days", "2", *keys.split(), *subject]
    subprocess.run(command, check=True, cwd=folder, capture_output=True)
    (folder / "served").mkdir()
    (folder / "served/small.gguf").symlink_to(smollm2)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=folder / "served")

        def log_message(self, *args):
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"https://localhost:{server.server_port}/small.gguf", folder / "cert.pem"
    server.shutdown()
    thread.join()
    server.server_close()


def test_doctor_finds_the_criu_inside(used):
    done = used.run("doctor", check=False)
    assert re.search(r"ok\s+llama.cpp .* variant", done.stdout)
    assert re.search(r"ok\s+snapshots\s+\w+: CRIU 4\.\d.* at \S*/app/\S+/criu/bin/criu", done.stdout)


def test_licenses_name_criu_with_its_text_and_the_offer(used):
    licences = used.json("version", "--licenses")
    names = {c["name"]: c for c in licences["components"]}
    assert names["criu"]["licence"] == "GPL-2.0-only"
    assert {"llama.cpp", "htm", "numpy", "textual", "libpython3.11", "pyinstaller"} <= set(names)
    assert names["criu"]["source"].startswith("pkg:deb/debian/criu@")
    folder = used.root / licences["folder"].lstrip("/") / "criu"
    text = "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    assert "GNU General Public License" in text
    assert "Written offer" in text
    assert "apt-get source NAME=VERSION" in text
    assert re.search(r"^msgspec \S+ +BSD-3-Clause$", used.run("version", "--licenses").stdout, re.M)


def test_pull_over_https(used, https):
    url, certificate = https
    shutil.copy(certificate, used.root / "tmp/cert.pem")
    refused = used.run("pull", url, "--name", "fetched", check=False)
    assert refused.returncode == 4, refused.stderr
    assert "certificate" in refused.stderr.lower()
    assert "trying again" not in refused.stderr
    assert "SSL_CERT_FILE" in refused.stderr
    pulled = used.json("pull", url, "--name", "fetched", SSL_CERT_FILE="/tmp/cert.pem")
    assert pulled["size_bytes"] > 90_000_000
    used.run("rm", "fetched", "--yes")


def test_resumed_answer_is_the_cold_one(warm):
    cold = warm.run(*ASK, "--resume", "never")
    resumed = warm.run(*ASK, "--resume", "always", "--timings")
    assert "resumed" in resumed.stderr
    assert resumed.stdout.strip()
    assert resumed.stdout == cold.stdout


def test_resumed_without_a_network(warm):
    done = warm.run(*ASK, "--resume", "always", options=("--no-network",))
    assert done.stdout.strip()


def test_resumed_endpoint_answers(warm):
    serving = warm.start("serve", MODEL, "--port", "0", "--resume", "always")
    try:
        base = f"http://127.0.0.1:{wait_for_port(serving)}"
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 4}
        document = httpx2.post(f"{base}/v1/chat/completions", json=body, timeout=60).json()
        assert document["choices"][0]["message"]["content"].strip()
        assert document["usage"]["completion_tokens"] == 4
    finally:
        serving.send_signal(signal.SIGTERM)
        serving.communicate(timeout=60)
    assert serving.returncode in (0, 143)


def test_resumed_chat_in_a_terminal(warm):
    chat = warm.on_a_terminal("chat", MODEL, "--resume", "always", dimensions=(30, 100))
    chat.expect(r"\x1b\[\?1049h")  # the alternate screen: Textual has the terminal
    chat.expect("smollm2")
    chat.send("Name three colours.\r")
    chat.expect(r"tokens?/s|tok/s")
    chat.sendcontrol("q")
    chat.expect(pexpect.EOF)
    chat.close()
    assert chat.exitstatus == 0


def test_completions_and_names(used):
    script = used.run("completion", "bash").stdout
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert MODEL in used.run("completion", "words", "run", "").stdout.split()
