"""instructor: a typed answer by a tool, by a schema and by Responses' tools, two turns each."""

import sys
from importlib.metadata import version
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel

url, model = sys.argv[1:]


class Place(BaseModel):
    """Where it is."""

    city: Literal["Paris", "Rome"]


for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
    plain = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=mode)
    talk = [{"role": "user", "content": "Where is the Louvre?"}]
    for question in ("And the Forum?", ""):
        limits = {"max_tokens": 60, "temperature": 0, "max_retries": 1}
        create = client.chat.completions.create
        answer = create(model=model, messages=talk, response_model=Place, **limits)
        assert answer.city in ("Paris", "Rome")
        talk += [{"role": "assistant", "content": answer.city}, {"role": "user", "content": question}]
print(version("instructor"))
