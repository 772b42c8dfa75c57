"""Open-weight language models in your own process.

    import fornax

    model = fornax.open("smollm2")
    print(model.chat("Why is the sky blue?", max_tokens=100).text)

A model is opened once and may be asked from any thread, as many requests at once as ``parallel`` says. While a call
waits, other threads of Python run; Ctrl-C stops it. What is refused or fails is a :class:`fornax.Error`, whose ``code``
programs can match on.
"""

from ._fornax import DEFAULT, Error, __version__
from .answer import Call, Completion, Likely, Part, Scored
from .model import Model, open, pull
from .options import ChatOptions, Options
from .stream import Stream

__all__ = [
    "DEFAULT",
    "Call",
    "ChatOptions",
    "Completion",
    "Error",
    "Likely",
    "Model",
    "Options",
    "Part",
    "Scored",
    "Stream",
    "__version__",
    "open",
    "pull",
]
