"""Grammar of the wordings of facts: sentences with one label and one verb, in every combination of their words.

Half of the statements have the name before the value, half the value before the name. Some words and sentences are held out
from training, to evaluate them: `new_words` fills the trained sentences with other words, `new_sentences` fills other
sentences with the trained words. A question may have another label than the statement, so only the name identifies a fact.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence

# fmt: off
WORDS: dict[str, tuple[str, ...]] = {
    "label": ("secret number", "number", "code", "password", "key", "value", "tag", "PIN", "serial number", "combination",
              "reference", "signature"),
    "is": ("is", "becomes", "remains", "will be", "must be", "should be"),
    "has": ("has", "uses", "needs", "carries", "shows", "gets"),
    "have": ("have", "use", "need", "carry", "show", "get"),
    "fits": ("fits", "matches", "belongs to", "goes with", "is for", "works for"),
    "take": ("Take", "Use", "Enter", "Type", "Write", "Choose"),
    "find": ("Find", "Give me", "Tell me", "Look up", "Name", "Repeat"),
}
HELD_OUT_WORDS: dict[str, tuple[str, ...]] = {
    "label": ("marker",), "is": ("equals",), "has": ("bears",), "have": ("bear",), "fits": ("pertains to",),
    "take": ("Insert",), "find": ("Recite",),
}
# fmt: on
STATEMENTS = (
    "\nThe {label} of the {name} {is} {value}.\n",
    "\nThe {name} {has} the {label} {value}.\n",
    "\nFor the {name}, the {label} {is} {value}.\n",
    "\nRemember: the {name} {has} a {label}, {value}.\n",
    "\nIn the list, the {name} {has} {value} as its {label}.\n",
    "\n{name}: the {label} {is} {value}\n",
    "\n{value} {is} the {label} of the {name}.\n",
    "\nThe {label} {value} {fits} the {name}.\n",
    "\n{take} {value} as the {label} for the {name}.\n",
    "\nRemember: {value} {fits} the {name} as its {label}.\n",
    "\nIn the list, {value} {is} the {label} for the {name}.\n",
    "\n{value}: the {label} that the {name} {has}\n",
)
QUESTIONS = (
    "\nQ: What {is} the {label} of the {name}? A: ",
    "\nWhich {label} does the {name} {have}? ",
    "\nWhich {label} {fits} the {name}? It is ",
    "\nThe {label} of the {name} {is} ",
    "\n{find} the {label} of the {name}: ",
    "\nFor the {name}, the {label} {is} ",
)
HELD_OUT_STATEMENTS = (
    "\nAmong other things, the {name} {has}, for a {label}, {value}.\n",
    "\nThere was also {value}, a {label} that {fits} the {name}.\n",
)
HELD_OUT_QUESTIONS = (
    "\nDoes anyone know what {label} the {name} {has}? ",
    "\nI forgot which {label} {fits} the {name}, namely ",
)


def expand(sentences: Sequence[str], words: Mapping[str, Sequence[str]]) -> list[str]:
    """Return each sentence with every combination of words; `{name}` and `{value}` remain."""
    expanded = []
    for sentence in sentences:
        slots = [slot for slot in re.findall(r"{(\w+)}", sentence) if slot in words]
        expanded += [
            sentence.format(name="{name}", value="{value}", **dict(zip(slots, chosen, strict=True)))
            for chosen in itertools.product(*(words[slot] for slot in slots))
        ]
    return expanded


# Templates of statements and of questions, by value of `data.wordings`. No configuration trains on the last two.
GRAMMARS: dict[str, tuple[list[str], list[str]]] = {
    "grammar": (expand(STATEMENTS, WORDS), expand(QUESTIONS, WORDS)),
    "new_words": (expand(STATEMENTS, HELD_OUT_WORDS), expand(QUESTIONS, HELD_OUT_WORDS)),
    "new_sentences": (expand(HELD_OUT_STATEMENTS, WORDS), expand(HELD_OUT_QUESTIONS, WORDS)),
}
