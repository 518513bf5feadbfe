"""Asking a trained model: load it, decode with a cache, continue prompts, many at once; and handing it on.

model = load_model("outputs/smoke-...")
(new,) = generate(model, ["def "], max_new_tokens=40)
"""

from nsa_lab.inference.decode import Decoder
from nsa_lab.inference.generate import generate
from nsa_lab.inference.load import NoCheckpoint, find_checkpoint, load_model
from nsa_lab.inference.sampling import Sampling
from nsa_lab.inference.shipping import ship
from nsa_lab.inference.text import Pace, complete, write_on

__all__ = [
    "Decoder",
    "NoCheckpoint",
    "Pace",
    "Sampling",
    "complete",
    "find_checkpoint",
    "generate",
    "load_model",
    "ship",
    "write_on",
]
