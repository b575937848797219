"""Drivers of a chat session in tests: read an answer to its end, and a front end that allows every call."""

from edgeinfer.tools.approval import Decision


def consume(answer):
    """Read an answer to its end, and store it; return its turn."""
    for event in answer.generation:
        answer.add(event)
        answer.flush()
    return answer.done


class AllowingFront:
    """Allow every call, and show none."""

    def decide(self, card):
        return Decision("once")

    def show_use(self, use, text):
        pass
