"""Plain English of any length, the same on every machine.

Greedy tokens of random-token prompts flip on bf16 ties whenever the shape of a computation changes, so prompts are
sentences. An article is a chain of sentence templates filled from small word lists by a seeded generator; two seeds
give two articles that differ from the first words on, so that no prompt is another one's prefix by accident.
"""

import random
from collections.abc import Callable, Iterator, Sequence

PLACES = (
    "the harbour", "the old mill", "the village school", "the railway station", "the upper meadow", "the market",
    "the lighthouse", "the town library", "the bakery at the corner", "the botanical garden", "the bridge",
    "the quarry",
)  # fmt: skip
PEOPLE = (
    "the miller", "a retired teacher", "the stationmaster", "a young carpenter", "the librarian",
    "the lighthouse keeper",
    "a travelling clockmaker", "the baker", "a quiet botanist", "the ferryman", "the mayor", "an elderly shepherd",
)  # fmt: skip
THINGS = (
    "a wooden boat", "a crate of apples", "the brass clock", "a map of the coast", "a bundle of letters",
    "the red bicycle",
    "a stone wall", "the church bell", "a basket of bread", "the weather station", "a telescope", "the garden gate",
)  # fmt: skip
SEASONS = ("spring", "early summer", "late summer", "autumn", "the first week of winter", "a mild January")
WEATHER = (
    "a light rain",
    "a steady wind from the west",
    "thick fog",
    "bright sunshine",
    "the first frost",
    "a warm breeze",
)
REASONS = (
    "because the road had been closed", "although nobody had asked for it", "so that the children could see it",
    "before the council could object", "since the old one had cracked", "while the others were still asleep",
)  # fmt: skip

OPENINGS = (
    "This is a short history of {place}, written down in {year} by {person}.",
    "Chapter {count}. In {season} of {year}, {person} walked all the way from {place} to {place2}.",
    "Dear friend, you asked me how {thing} came to stand beside {place}, and I will try to explain.",
    "Minutes of the meeting held at {place} on the {count}th of May {year}, with {person} in the chair.",
    "How to repair {thing}: a guide in {count} steps, as {person} explained it to us at {place}.",
    "Once upon a time {person} and {person2} lived near {place}, and they owned {thing}.",
    "The report on {place} begins with a question: who left {thing} there in {year}?",
    "Travellers who reach {place} in {season} are often surprised by {weather}.",
)
SENTENCES = (
    "In {season}, {person} carried {thing} to {place} {reason}.",
    "There was {weather} that day, and it lasted for {count} hours.",
    "By {year} the number of visitors had grown to {many}, which was more than {place} could hold.",
    "{person_cap} said that {thing} was worth at least {count} silver coins.",
    "Nobody at {place} remembered who had built it, but {person} kept a list of every repair.",
    "The distance between {place} and {place2} is about {count} kilometres, mostly along the river.",
    "After supper {person} read aloud from a book about the sea, and {person2} listened by the window.",
    "It took {count} people and {count2} days to move {thing} across the valley.",
    "The children learned that water boils sooner on a mountain, and that ice floats on a lake.",
    "When {weather} came, {person} closed the shutters and lit the lamp.",
    "Of the {many} trees planted near {place}, only {count} were still standing in {year}.",
    "A letter from {person} arrived in {season}, and it mentioned {thing} twice.",
    "{person_cap} and {person2} agreed to meet at {place} every Thursday at {count} minutes past nine.",
    "The council paid {many} pounds for {thing}, {reason}.",
    "From the roof of {place} one could see {place2} and, on a clear day, the whole bay.",
    "Each morning {person} counted the boats, wrote the number down, and went back to work.",
    "The recipe calls for flour, salt, water, and patience, as {person} liked to say.",
    "For {count} years {thing} stayed where it was, {reason}.",
)


def _fill(template: str, rng: random.Random) -> str:
    person, person2 = rng.sample(PEOPLE, 2)
    place, place2 = rng.sample(PLACES, 2)
    filled = template.format(
        person=person,
        person2=person2,
        person_cap=person[0].upper() + person[1:],
        place=place,
        place2=place2,
        thing=rng.choice(THINGS),
        season=rng.choice(SEASONS),
        weather=rng.choice(WEATHER),
        reason=rng.choice(REASONS),
        year=rng.randrange(1780, 1990),
        count=rng.randrange(4, 30),
        count2=rng.randrange(2, 12),
        many=rng.randrange(40, 900) * 10,
    )
    return filled[0].upper() + filled[1:]


def _sentences(seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    yield _fill(OPENINGS[seed % len(OPENINGS)], rng)
    while True:
        order = list(SENTENCES)
        rng.shuffle(order)
        for template in order:
            yield _fill(template, rng)


def article(seed: int, num_words: int) -> str:
    """At least `num_words` words of running text."""
    parts: list[str] = []
    words = 0
    for sentence in _sentences(seed):
        parts.append(sentence)
        words += sentence.count(" ") + 1
        if words >= num_words:
            break
    return " ".join(parts)


def prompt_of(encode: Callable[[str], Sequence[int]], seed: int, num_tokens: int) -> list[int]:
    """The first `num_tokens` token ids of the article `seed`; `encode` adds no special tokens."""
    ids = encode(article(seed, num_tokens + 8))
    if len(ids) < num_tokens:
        raise ValueError(f"article {seed} has {len(ids)} tokens, {num_tokens} were asked for: make it longer")
    return list(ids[:num_tokens])
