"""Pictures over HTTP, on the real engine with a model and a projector of random weights.

The requests are those of llama.cpp (tools/server/tests/unit/test_vision_api.py) and of the official
clients' READMEs.
"""

import base64
import io

import ollama
import pytest
from made_decoders import make_qwen2vl
from made_projectors import make_projector

Image = pytest.importorskip("PIL.Image")
pytestmark = [pytest.mark.model, pytest.mark.needs("encoder")]

MODEL = "sees"
ASKED = "What is this?"
GREEDY = {"temperature": 0}


def picture(color: str) -> bytes:
    """Return a picture with a gradient and an area of that color."""
    image = Image.linear_gradient("L").resize((96, 64)).convert("RGB")
    image.paste(Image.new("RGB", (48, 64), color), (0, 0))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


RED, BLUE = picture("red"), picture("blue")


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64_of(data)}"


@pytest.fixture(scope="module")
def engine(load_model, smollm2, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sees")
    model = make_qwen2vl(folder / "model.gguf", smollm2)
    projector = make_projector(folder / "mmproj.gguf", "qwen2vl_merger", 64)
    return load_model(model, MODEL, projector=projector, n_ctx=2048)


@pytest.fixture(scope="module")
def sees(serve_module, engine):
    return serve_module(engine)


@pytest.fixture(scope="module")
def openai_client(sees, openai):
    with openai.OpenAI(base_url=f"{sees.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def anthropic_client(sees, anthropic):
    with anthropic.Anthropic(base_url=sees.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def ollama_client(sees):
    with ollama.Client(sees.url) as client:
        yield client


@pytest.mark.parametrize(
    ("text", "data", "refusal"),
    [
        ("What is this: <__media__>\n", [RED], ""),
        ("What is this: <__media__> or <__media__>\n", [RED, BLUE], ""),
        ("What is this: <__media__>\n", ["malformed"], "not valid base64"),
        ("What is this:\n", [""], "1 pictures, but 0 placeholders <__media__>"),
        ("What is this: <__media__>\n", [], "0 pictures, but 1 placeholders"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_completion_reads_pictures_where_its_prompt_has_them(sees, text, data, refusal, stream):
    encoded = [piece if isinstance(piece, str) else base64_of(piece) for piece in data]
    prompt = {"prompt_string": text, "multimodal_data": encoded}
    body = {"temperature": 0.0, "top_k": 1, "n_predict": 8, "prompt": prompt, "stream": stream}
    reply = sees.client.post("/completion", json=body)
    assert reply.status_code == (400 if refusal else 200), reply.text
    assert refusal in reply.text


def test_completion_without_pictures_keeps_its_marker_as_text(sees):
    def answer(**prompt) -> dict:
        body = {"temperature": 0.0, "n_predict": 8, "prompt": {"prompt_string": ASKED} | prompt}
        return sees.client.post("/completion", json=body).json()

    marker = "What is this: <__media__>\n"
    as_text = answer(prompt_string=marker)
    datas = ([base64_of(RED)], [base64_of(BLUE)])
    red, blue = (answer(prompt_string=marker, multimodal_data=data) for data in datas)
    assert len({reply["content"] for reply in (as_text, red, blue)}) == 3
    assert red["prompt"] == marker
    assert red["tokens_evaluated"] == blue["tokens_evaluated"]


def test_embeddings_of_pictures_are_refused(sees):
    prompt = {"prompt_string": "<__media__>", "multimodal_data": [base64_of(RED)]}
    sees.post("/embeddings", {"content": [prompt]}, status=400)


def by_openai_chat(client, *pictures):
    parts = [{"type": "image_url", "image_url": {"url": uri(picture)}} for picture in pictures]
    turns = [{"role": "user", "content": [*parts, {"type": "text", "text": ASKED}]}]
    asked = {"model": MODEL, "messages": turns, "max_tokens": 8}
    reply = client.chat.completions.create(**asked, **GREEDY)
    return reply.choices[0].message.content, reply.usage.prompt_tokens


def by_openai_responses(client, *pictures):
    parts = [{"type": "input_image", "image_url": uri(picture)} for picture in pictures]
    turns = [{"role": "user", "content": [*parts, {"type": "input_text", "text": ASKED}]}]
    reply = client.responses.create(model=MODEL, input=turns, max_output_tokens=8, **GREEDY)
    return reply.output_text, reply.usage.input_tokens


def blocks(*pictures: bytes) -> list[dict]:
    source = {"type": "base64", "media_type": "image/png"}
    return [{"type": "image", "source": source | {"data": base64_of(picture)}} for picture in pictures]


def by_anthropic(client, *pictures):
    content = [*blocks(*pictures), {"type": "text", "text": ASKED}]
    reply = client.messages.create(
        model=MODEL, max_tokens=8, messages=[{"role": "user", "content": content}], extra_body=GREEDY
    )
    used = reply.usage
    cached = (used.cache_read_input_tokens or 0) + (used.cache_creation_input_tokens or 0)
    return reply.content[0].text, used.input_tokens + cached


def by_ollama(client, *pictures):
    turns = [{"role": "user", "content": ASKED, "images": list(pictures)}]
    reply = client.chat(model=MODEL, messages=turns, options=GREEDY | {"num_predict": 8})
    return reply.message.content, reply.prompt_eval_count


def test_four_clients_get_one_answer_about_each_picture(openai_client, anthropic_client, ollama_client):
    asked = [(RED,), (BLUE,), (RED, BLUE), (BLUE, RED)]
    answers = [by_openai_chat(openai_client, *pictures) for pictures in asked]
    assert len({text for text, _ in answers}) == len(asked)
    for ask, client in (
        (by_openai_responses, openai_client),
        (by_anthropic, anthropic_client),
        (by_ollama, ollama_client),
    ):
        assert [ask(client, *pictures) for pictures in asked] == answers


def test_tokens_of_pictures_are_counted_as_they_are_used(anthropic_client):
    call = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
    turns = [
        {"role": "user", "content": [*blocks(RED), {"type": "text", "text": ASKED}]},
        {"role": "assistant", "content": [call]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": blocks(BLUE)}],
        },
    ]
    messages = anthropic_client.messages
    for asked in (turns[:1], turns):
        count = messages.count_tokens(model=MODEL, messages=asked).input_tokens
        used = messages.create(model=MODEL, max_tokens=1, messages=asked).usage
        cached = used.cache_read_input_tokens + used.cache_creation_input_tokens
        assert used.input_tokens + cached == count
    assert used.cache_read_input_tokens > 0
