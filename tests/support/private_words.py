"""Words that only this project's authors understood, and what to write instead.

A busy engineer should read each sentence once. `tests/house/test_words.py` holds the pages of the docs to this list;
code, paths and names between backticks are left out of account there.
"""

from typing import Final

PRIVATE_WORDS: Final[tuple[tuple[str, str], ...]] = (
    # (a regular expression, matched without regard to case; what to write instead)
    (r"\b(?:is|are|was|were|be|been|being|not) told\b", "is reported, is logged, is raised"),
    (r"\btold as\b", "reported as"),
    (r"\btells? of\b", "reports, logs"),
    (r"\b(?:is|are|was|were|be|been) said\b", "is reported, a warning says"),
    (r"\b\w*soever\b", "any; whichever, for whatever reason"),
    (r"\b(?:whoever|whomever|whosever)\b", "name the actor: anyone who, a user who, a worker that"),
    (r"\bwhatever\b", "any, all, regardless of"),
    (r"\b(?:nobody|somebody)\b", "name the actor: no worker, a program"),
    (r"\breckon\w*\b", "compute, estimate, count"),
    (r"\bamid(?:st)?\b", "during, in the middle of"),
    (r"\bcom(?:es?|ing) of\b", "results from, is caused by"),
    (r"\balike\b", "replicated, equal, the same"),
    (r"\bbehind\b", "in the background, after, next to"),
    (r"\bstands?\b(?!-| alone|ard)", "is, is recorded, is listed"),
    (r"\b(?:lies|lie|lain)\b", "is, is stored"),
    (r"\banew\b", "again, from scratch"),
    (r"\bhow manieth\b", "which (a number)"),
    (r"\b(?:the word of|takes? the word|word that|word of)\b", "a message, a notice"),
    (r"\b(?:such are|so is it|so it is with|so are they)\b", "turn the sentence around: subject, verb, object"),
    (r"(?<!there )\bis no (?!longer\b|more than\b)\w+", "is not a"),
    (r"(?<!there )\bare no (?!longer\b|more than\b)\w+", "are not"),
    (r"\bcan(?:not)? be had\b", "is available"),
    (r"\bis to be had\b", "is available"),
    (r"\b(?:make|makes|made|making) good\b", "correct, repair"),
    (r"\b(?:make|makes|made|making) ready\b", "prepare, allocate"),
    (r"\bcomes? by again\b", "next reaches"),
    (r"\b(?:make|makes|made|making) an end\b", "end, finish"),
    (r"\bhand(?:s|ed|ing)? on\b", "export, pass, forward"),
    (r"\b(?:thereof|whereof|wherein|herein|therein|whereby)\b", "of it, in which, by which"),
    (r"\bas it comes\b", "with its default settings"),
    (r"\bmishaps?\b", "failure, error"),
    (r"\bthe like\b", "and similar; or name them"),
    (r"\bthose of it\b", "repeat the noun"),
    (r"\bis(?: all)? of no \w+", "does not matter, is not used"),
    (r"\bwithout a word\b", "silently"),
    (r"\bin the place of\b", "instead of"),
    (r"\btime that is left\b", "remaining time"),
    (r"\bdoors?\b", "integration, entry point"),
)

BRITISH: Final[tuple[tuple[str, str], ...]] = (
    (r"\b\w*(?:behaviour|colour|favour|honour|neighbour|labour)\w*\b", "-or: behavior, color"),
    (
        r"\b(?:\w*(?:initial|synchron|serial|normal|organ|recogn|summar|minim|maxim|quant|random|parallel|custom|final|real|general|special|util|author|prior|canonical|local|vector)is(?:e|es|ed|ing|ation|ations|er|ers))\b",
        "-ize: initialize, synchronize",
    ),
    (r"\boptimis(?:e|es|ed|ing|ation|ations|er|ers)\b", "-ize: optimize, optimizer"),
    (r"\b(?:centre|metre|theatre|fibre)s?\b", "-er: center"),
    (r"\b(?:labell|modell|travell|cancell|signall)(?:ed|ing)\b", "one l: labeled, canceled"),
    (r"\b(?:grey|catalogue|programme|licence|defence)\b", "gray, catalog, program, license, defense"),
)
"""American spelling."""
