"""An OpenAI-compatible HTTP server over the engine; needs the extra `serve`.

Invariants: nothing here imports a model; the engine comes from outside, and one app serves one engine.
"""

from jaxkv.serve.app import create_app
from jaxkv.serve.options import Limits, Served, served_by
from jaxkv.serve.server import Server, bind

__all__ = ["Limits", "Served", "Server", "bind", "create_app", "served_by"]
