"""Synthetic long-context tasks: retrieval, copying, variable tracking (standard library only, seedable).

    prompt, answer = make(task, n_chars, seed, filler)

`prompt` is about n_chars characters, `answer` starts with a space and is the exact greedy continuation expected; a
sample counts as correct when the greedily decoded text starts with it. `filler(rng, n_chars)` supplies the text around
the
facts: text_filler() cuts it from a real text, default_filler() makes sentences up.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

TASKS = ["lines", "passkey", "multineedle", "kv", "copy", "vartrack", "fewshot", "count", "tools"]

SHORTEST = 150  # characters

Filler = Callable[[random.Random, int], str]
Segments = list[tuple[str, bool]]

# ruff: noqa: SIM905 - a text block reads better than four hundred quoted words
ADJ = (
    "able acid aged airy amber ample angry apt arid avid bald bare basic blind bold brave brief bright brisk "
    "broad calm cheap chief civil clean clear close cold cool crisp cruel curly damp dark dear deep dense dim "
    "dirty dry dull eager early easy empty equal exact faint fair false fancy fast fatal fierce final firm fit "
    "flat fond frail free fresh full funny gentle giant glad good grand gray great green grim happy hard harsh "
    "heavy high hollow honest huge humble icy ideal idle jolly keen kind large late lazy lean light little local "
    "lone long loose loud low loyal lucky mad main mild minor modern moist narrow neat new nice noble noisy numb "
    "odd old open oval pale plain polite poor proud pure quick quiet rapid rare raw ready real rich rigid ripe "
    "rough round royal rude rural rusty safe salty sandy sharp shiny short shy silent silver simple slim slow "
    "small smart smooth soft solid sour spare square stable steep stiff still strange strict strong sunny sweet "
    "swift tall tame tart tender thick thin tidy tiny tired torpid tough true ugly urban usual vague vain vast "
    "vivid warm weak weird wet white whole wide wild wise wooden wrong yellow young"
).split()
NOUN = (
    "actor angle ankle apple apron arch arrow atlas badge baker band bank barn basin basket beach bean bear beard "
    "bell bench berry bird blade block board boat bone book boot bottle bowl box brain branch brass bread brick "
    "bridge broom brush bucket bulb bush button cabin cable cactus cake camel camera canal candle canoe canyon "
    "cap captain card carpet cart castle cat cave cellar chain chair chalk chart cheese cherry chest chief "
    "chimney circle city clay clerk cliff clock cloth cloud clown coast coat coin collar comb comet cook copper "
    "coral corn cotton couch cousin cow crab crane crayon cream crow crown cube cup curtain dancer deer desk "
    "diamond dish doctor dog doll door dragon drawer dress drum duck eagle ear earth egg elbow engine fabric face "
    "falcon farm farmer feather fence field finger fish flag flame flower flute foot forest fork fox frame frog "
    "fruit garden gate ghost giraffe glass globe glove goat gold goose grape grass guard guitar hammer hand "
    "harbor hat hawk hedge helmet hill honey hook horn horse hotel house insect iron island jacket jar jewel "
    "judge juice kettle key kid king kitchen kite knee knife knight ladder lake lamp lawyer leaf lemon letter "
    "lion lizard lock lunch magnet map marble market mask meadow metal mill mirror monkey moon mother motor "
    "mountain mouse mouth mule museum nail needle nest night nose nurse oak ocean office olive onion orange "
    "orchid oven owl ox paint palace palm panda paper parrot pasta peach peanut pearl pen pepper piano pilot pin "
    "pipe pirate planet plate plum pocket poet pond pony potato prince pump puppet queen rabbit radio rail rain "
    "ram ranch ribbon rice ring river road robin robot rock roof room root rope rose ruler sail salad salt sand "
    "scarf school sea seal seed shade shark sheep shelf shell ship shirt shoe shop sister skirt sky sled snail "
    "snake snow sock soda sofa soldier song soup spider spoon spring squid stair star statue stone storm stove "
    "street sugar suit sun swan sword table tail tailor tea teacher temple tent thumb tiger toast tooth tower "
    "town toy train tray tree truck trunk tulip tunnel turtle uncle valley vase vest violin voice wagon wall "
    "watch water wave whale wheel whip window wing winter witch wolf wood wool worker yard zebra"
).split()
NAMES = (
    "Alice Bernard Carla Dmitri Elena Felix Greta Hassan Irene Jonas Karen Liam Maria Nadia Oscar Paula Quentin "
    "Rosa Samuel Tanya Ulrich Vera Walter Xenia Yusuf Zoe Berlin Cairo Delhi Dublin Geneva Havana Lima Lisbon "
    "London Madrid Milan Moscow Nairobi Oslo Ottawa Paris Prague Quito Rome Seoul Sofia Sydney Tokyo Tunis Vienna "
    "Warsaw Zurich"
).split()
LABELS = "alpha beta gamma delta kappa lambda omega sigma theta zeta red blue green black".split()
SENTENCES = [
    "The {a} {n} stood near the {m}.",
    "A {n} was placed beside the {a} {m} and nobody moved it.",
    "When the {n} is {a}, the {m} must be checked again.",
    "It is not clear whether the {m} needs a {a} {n}.",
    "Every {a} {n} in this section has one {m}.",
    "They walked past the {n} and the {a} {m} in the evening.",
]
NEEDLES = [
    "The secret code for {k} is {v}.",
    "Remember that the pass key for {k} is {v}.",
    "Note: the access code of {k} is {v}.",
    "The special number assigned to {k} is {v}.",
]
NEEDLE_QUESTIONS = [
    "What is the secret code for {k}?",
    "What is the pass key for {k}?",
    "What is the access code of {k}?",
    "What is the special number assigned to {k}?",
]


def default_filler(rng: random.Random, n_chars: int) -> str:
    """Made-up sentences, a little over n_chars characters."""
    out, total = [], 0
    while total < n_chars:
        s = rng.choice(SENTENCES).format(a=rng.choice(ADJ), n=rng.choice(NOUN), m=rng.choice(NOUN))
        out.append(s)
        total += len(s) + 1
    return " ".join(out)


def text_filler(source: str) -> Filler:
    """Filler cut at line ends from a text file (source: its path) or from a text (source: holds a newline)."""
    text = source if "\n" in source else Path(source).read_text(encoding="utf-8")

    def fill(rng: random.Random, n_chars: int) -> str:
        i = rng.randrange(max(1, len(text) - n_chars - 2000))
        j = text.find("\n", i, i + 1500)
        i = j + 1 if j >= 0 else i
        s = text[i : i + n_chars]
        j = s.rfind("\n", int(n_chars * 0.85))
        return (s[:j] if j > 0 else s).strip("\n")

    return fill


def _code(rng: random.Random) -> str:
    return str(rng.randrange(10000, 100000))


def _distinct(rng: random.Random, n: int, draw: Callable[[], str]) -> list[str]:
    found: set[str] = set()
    while len(found) < n:
        found.add(draw())
    out = sorted(found)
    rng.shuffle(out)
    return out


def _codes(rng: random.Random, n: int) -> list[str]:
    return _distinct(rng, n, lambda: _code(rng))


def _ask(rng: random.Random, items: list[tuple[str, str]], n_questions: int, question: str) -> Segments:
    segments: Segments = []
    for key, value in rng.sample(items, min(n_questions, len(items))):
        segments.append((question.format(k=key) + "\nAnswer:", False))
        segments.append((" " + value, True))
    return segments


def _scatter(rng: random.Random, filler: Filler, n_chars: int, sentences: list[str], joiner: str = "\n") -> str:
    """Insert sentences, in order, at random line or sentence ends of filler text."""
    body = filler(rng, max(50, n_chars - sum(len(s) + 2 for s in sentences)))
    cuts = []
    for p in sorted(rng.random() for _ in sentences):
        i = int(p * len(body))
        j = body.find("\n", i, i + 300)
        if j < 0:
            j = body.find(". ", i, i + 300)
            j = j + 1 if j >= 0 else -1
        cuts.append(i if j < 0 else j)
    out, last = [], 0
    for cut, s in zip(cuts, sentences, strict=True):
        cut = max(cut, last)
        out.append(body[last:cut])
        out.append(joiner + s + joiner)
        last = cut
    out.append(body[last:])
    return "".join(out)


def gen_lines(rng: random.Random, n: int, filler: Filler, n_questions: int) -> Segments:
    """LongEval-style lines: the register content of a named line."""
    m = max(3, min(400, (n - 220) // 49))
    keys = _distinct(rng, m, lambda: rng.choice(ADJ) + "-" + rng.choice(NOUN))
    pairs = list(zip(keys, _codes(rng, m), strict=True))
    body = "".join(f"line {k}: REGISTER_CONTENT is <{v}>\n" for k, v in pairs)
    head = "Below is a record of lines to remember. Each line has a register content.\n\n" + body
    return [(head, False), *_ask(rng, pairs, n_questions, "\nQuestion: What is the REGISTER_CONTENT in line {k}?")]


def gen_passkey(rng: random.Random, n: int, filler: Filler, n_questions: int) -> Segments:
    """One code hidden in text."""
    name = rng.choice(NAMES)
    code = _code(rng)
    t = rng.randrange(len(NEEDLES))
    body = _scatter(rng, filler, n - 160, [NEEDLES[t].format(k=name, v=code)], rng.choice(["\n", "\n\n", " "]))
    head = "Read the text and remember the code in it.\n\n" + body + "\n"
    return [(head, False), *_ask(rng, [(name, code)], 1, "\nQuestion: " + NEEDLE_QUESTIONS[t])]


def gen_multineedle(rng: random.Random, n: int, filler: Filler, n_questions: int) -> Segments:
    """Three to five codes hidden in text, one asked."""
    m = rng.randint(3, 5)
    names = rng.sample(NAMES, m)
    codes = _codes(rng, m)
    t = rng.randrange(len(NEEDLES))
    pairs = list(zip(names, codes, strict=True))
    sentences = [NEEDLES[t].format(k=k, v=v) for k, v in pairs]
    body = _scatter(rng, filler, n - 160, sentences, rng.choice(["\n", "\n\n", " "]))
    head = "Read the text and remember the codes in it.\n\n" + body + "\n"
    return [(head, False), *_ask(rng, pairs, n_questions, "\nQuestion: " + NEEDLE_QUESTIONS[t])]


def gen_kv(rng: random.Random, n: int, filler: Filler, n_questions: int) -> Segments:
    """A JSON object of random keys, one value asked."""
    m = max(3, min(400, (n - 120) // 24))
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    keys = _distinct(rng, m, lambda: "".join(rng.choice(letters) for _ in range(6)))
    pairs = list(zip(keys, _codes(rng, m), strict=True))
    body = "JSON data:\n{\n" + ",\n".join(f'  "{k}": "{v}"' for k, v in pairs) + "\n}\n"
    segments: Segments = [(body, False)]
    for k, v in rng.sample(pairs, min(n_questions, m)):
        segments += [(f'\nKey: "{k}"\nValue:', False), (" " + v, True)]
    return segments


def _word(rng: random.Random) -> str:
    if rng.random() < 0.35:
        return "".join(rng.choice("bcdfghklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3)))
    return rng.choice(NOUN) if rng.random() < 0.6 else rng.choice(ADJ)


def gen_copy(rng: random.Random, n: int, filler: Filler, n_questions: int) -> Segments:
    """A list of random words; five of them in a row must be continued by the next eight."""
    if rng.random() < 0.5:
        m = max(16, int((n - 120) / 6.0))
        words = [_word(rng) for _ in range(m)]
        text = " ".join(words) + "\n"
    else:
        m = rng.randint(16, max(17, min(80, n // 12)))
        words = [_word(rng) for _ in range(m)]
        text = _scatter(rng, filler, n - 200, ["Word list: " + " ".join(words)], "\n\n") + "\n"
    segments: Segments = [("Remember the words.\n\n" + text, False)]
    for _ in range(min(n_questions, 1 + m // 20)):
        i = rng.randrange(0, m - 13 + 1)
        segments += [
            ("\nContinue: " + " ".join(words[i : i + 5]), False),
            (" " + " ".join(words[i + 5 : i + 13]), True),
        ]
    return segments


def gen_vartrack(rng: random.Random, n: int, filler: Filler, n_questions: int) -> Segments:
    """Assignment chains hidden in text; the number behind a variable one to four steps away."""
    n_chains = rng.randint(2, 5)
    lengths = [rng.randint(2, 5) for _ in range(n_chains)]
    names = rng.sample(NOUN, sum(lengths))
    values = _codes(rng, n_chains)
    variables, chains, p = [], [], 0
    for c in range(n_chains):
        vs = names[p : p + lengths[c]]
        p += lengths[c]
        variables.append(vs)
        chains.append([f"VAR {vs[0]} = {values[c]};"] + [f"VAR {b} = VAR {a};" for a, b in pairwise(vs)])
    order = [c for c in range(n_chains) for _ in variables[c]]
    rng.shuffle(order)
    steps = [iter(c) for c in chains]
    body = _scatter(rng, filler, n - 160, [next(steps[c]) for c in order])
    items = [(v, values[c]) for c in range(n_chains) for v in variables[c][1:]]
    head = "Track the variables.\n\n" + body + "\n"
    return [(head, False), *_ask(rng, items, n_questions, "\nQuestion: What is the value of VAR {k}?")]


def gen_fewshot(rng: random.Random, n: int, filler: Filler, n_questions: int) -> Segments:
    """A random word -> label mapping shown by examples; one word asked again."""
    m = max(4, min(60, n // 60))
    words = rng.sample(NOUN, m)
    labels = rng.sample(LABELS, rng.randint(2, 6))
    label = {w: rng.choice(labels) for w in words}
    shown = list(words)
    total = sum(len(w) + 19 for w in shown)
    while total < n - 130:
        w = rng.choice(words)
        shown.append(w)
        total += len(w) + 19
    if len(shown) > m:
        rng.shuffle(shown)
    head = "Each word has a label.\n\n" + "".join(f"word: {w} label: {label[w]}\n" for w in shown)
    segments: Segments = [(head, False)]
    seen = sorted(set(shown))
    for w in rng.sample(seen, min(n_questions, len(seen))):
        segments += [(f"\nword: {w} label:", False), (" " + label[w], True)]
    return segments


def gen_count(rng: random.Random, n: int, filler: Filler, n_questions: int) -> Segments:
    """How often a marker sentence occurs in the text (one to six times)."""
    words = rng.sample(NOUN, 2)
    counts = [rng.randint(1, 6) for _ in words]
    sentences = [f"[EVENT] The {w} was seen." for w, c in zip(words, counts, strict=True) for _ in range(c)]
    rng.shuffle(sentences)
    body = _scatter(rng, filler, n - 170, sentences)
    segments: Segments = [("Count the events.\n\n" + body + "\n", False)]
    for w, c in list(zip(words, counts, strict=True))[: max(1, min(2, n_questions))]:
        segments += [(f"\nQuestion: How many times was the {w} seen?\nAnswer:", False), (f" {c}", True)]
    return segments


def gen_tools(rng: random.Random, n: int, filler: Filler, n_questions: int) -> Segments:
    """A list of functions with two parameters each; a request must become the JSON of its call."""
    m = max(3, min(400, (n - 560) // 108))
    names = [x.replace("-", "_") for x in _distinct(rng, m, lambda: rng.choice(ADJ) + "-" + rng.choice(NOUN))]
    params = {name: rng.sample(NOUN, 2) for name in names}

    def declared(name: str) -> str:
        text, number = params[name]
        return f'{{"name": "{name}", "parameters": {{"{text}": "string", "{number}": "integer"}}}}\n'

    def asked(name: str) -> tuple[str, str]:
        values = rng.choice(NAMES), rng.randrange(100, 1000)
        text, number = params[name]
        call = f' {{"name": "{name}", "arguments": {{"{text}": "{values[0]}", "{number}": {values[1]}}}}}'
        return f"\nRequest: {name.replace('_', ' ')} with {values[0]} and {values[1]}\nCall:", call

    head = "These functions can be called. Answer a request with one JSON object.\n\n" + "".join(map(declared, names))
    shown, *wanted = rng.sample(names, min(1 + n_questions, m))
    segments: Segments = [(head + "".join(asked(shown)) + "\n", False)]
    for name in wanted:
        request, call = asked(name)
        segments += [(request, False), (call, True)]
    return segments


GENERATORS: dict[str, Callable[[random.Random, int, Filler, int], Segments]] = {
    "lines": gen_lines,
    "passkey": gen_passkey,
    "multineedle": gen_multineedle,
    "kv": gen_kv,
    "copy": gen_copy,
    "vartrack": gen_vartrack,
    "fewshot": gen_fewshot,
    "count": gen_count,
    "tools": gen_tools,
}


def segments(
    task: str, n_chars: int, rng: random.Random, filler: Filler | None = None, n_questions: int = 1
) -> Segments:
    """[(text, is_answer)] of one context with up to n_questions questions (training uses several)."""
    return GENERATORS[task](rng, n_chars, filler or default_filler, n_questions)


def make(task: str, n_chars: int, seed: int, filler: Filler | None = None) -> tuple[str, str]:
    """(prompt, answer) of one sample; the same arguments give the same sample."""
    rng = random.Random(f"{task}-{seed}")
    parts = segments(task, n_chars, rng, filler, 1)
    return "".join(s for s, _ in parts[:-1]), parts[-1][0]


def _measured(
    task: str, n_chars: int, seed: int, filler: Filler | None, count: Callable[[str], int]
) -> tuple[str, str, int]:
    prompt, answer = make(task, n_chars, seed, filler)
    return prompt, answer, count(prompt) + count(answer) + 1


def least(task: str, seed: int, filler: Filler | None, count: Callable[[str], int]) -> int:
    """Tokens of the shortest sample: make_fit() has none for fewer."""
    return _measured(task, SHORTEST, seed, filler, count)[2]


def make_fit(
    task: str, n_tokens: int, seed: int, filler: Filler | None, count: Callable[[str], int]
) -> tuple[str, str]:
    """A sample whose prompt and answer take 0.93 n_tokens to n_tokens tokens; count(text) -> tokens without BOS.
    ValueError when even the shortest takes more.
    """
    n, best = int(n_tokens * 3), None
    for _ in range(14):
        prompt, answer, total = _measured(task, n, seed, filler, count)
        if total <= n_tokens and (best is None or total > best[2]):
            best = (prompt, answer, total)
            if total >= 0.93 * n_tokens:
                break
        n = max(SHORTEST, int(n * min(1.6, max(0.4, 0.97 * n_tokens / total))))
    best = best or _measured(task, SHORTEST, seed, filler, count)
    if best[2] > n_tokens:
        raise ValueError(f"no {task} sample fits {n_tokens} tokens, the shortest has {best[2]}; ask for a longer one")
    return best[0], best[1]
