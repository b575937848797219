"""The request behind an answer as code, for the endpoint's OpenAI dialect."""

from __future__ import annotations

import shlex
from typing import Any

import msgspec

from edgeinfer.chat.history.values import branch_to
from edgeinfer.chat.session import ChatSession
from edgeinfer.errors import UsageError
from edgeinfer.runtime.pictures import PICTURE_MARK

_PYTHON = """from openai import OpenAI

client = OpenAI(base_url="{base}/v1", api_key="none")
answer = client.chat.completions.create(
    model={model},
    messages={messages},{options}
)
print(answer.choices[0].message.content)
"""
_JAVASCRIPT = """const answer = await fetch("{base}/v1/chat/completions", {{
  method: "POST",
  headers: {{"content-type": "application/json"}},
  body: JSON.stringify({body}),
}});
console.log((await answer.json()).choices[0].message.content);
"""


def as_code(session: ChatSession, turn_id: int, form: str, base: str, system: str) -> str:
    """Write the request of the answer `turn_id` (0: of the latest) as curl, Python or JavaScript.

    `system` is the model's own system prompt. Pictures are left out. Raises UsageError.
    """
    question = session.question
    if turn_id:
        turn = session.turn(turn_id)
        question = turn if turn.role == "user" else session.turn(turn.parent_id or 0)
    if question is None:
        raise UsageError("there is no request yet", hint="ask something first")
    messages = session.messages(branch_to({t.id: t for t in session.all_turns()}, question.id))
    options: dict[str, Any] = {
        name: value for name, value in session.conversation.sampling.items() if value is not None
    }
    body = {
        "model": session.conversation.model,
        "messages": [
            *(
                [{"role": "system", "content": system}]
                if system and messages[0].role != "system"
                else []
            ),
            *({"role": m.role, "content": m.content.replace(PICTURE_MARK, "")} for m in messages),
        ],
        **options,
    }
    pretty = msgspec.json.format(msgspec.json.encode(body), indent=2).decode()
    if form == "curl":
        address = f"{base}/v1/chat/completions"
        return f"curl {address} -H 'content-type: application/json' -d {shlex.quote(pretty)}\n"
    if form == "javascript":
        return _JAVASCRIPT.format(base=base, body=pretty.replace("\n", "\n  "))
    return _PYTHON.format(
        base=base,
        model=repr(body["model"]),
        messages=repr(body["messages"]),
        options="".join(f"\n    {name}={value!r}," for name, value in options.items()),
    )
