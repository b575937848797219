"""Conversations by the template alone, and no constraints: what the engine works with where nothing better is there."""

from __future__ import annotations

from edgeinfer.errors import InvalidRequestError, UnsupportedConstraintError
from edgeinfer.runtime.constraint_api import CompiledConstraint, VocabView
from edgeinfer.runtime.parsers_api import Prepared, TemplateFacts
from edgeinfer.runtime.requests import Constraint, GenerateRequest
from edgeinfer.runtime.templates import TRANSCRIPT, ChatTemplate


class PlainConversations:
    """The model's template; no tools, no parsers."""

    tool_format = ""

    def __init__(self, facts: TemplateFacts) -> None:
        self._template = ChatTemplate.load(facts.template or TRANSCRIPT, facts.bos_text, facts.eos_text)

    def render(self, request: GenerateRequest) -> str:
        return self._template.render(
            request.messages, request.tools, options=request.template_options, continue_final=request.continue_final
        )

    def prepare(self, request: GenerateRequest) -> Prepared:
        if request.tools:
            raise InvalidRequestError("tools are not supported", param="tools")
        return Prepared(prompt=self.render(request))


class NoConstraints:
    """Refuses every constraint."""

    def compile(self, constraint: Constraint, vocab: VocabView) -> CompiledConstraint:
        raise UnsupportedConstraintError("constraints are not supported", param="constraint")
