"""Which emoji become concepts of the demo model, by a fixed rule over emojibase's labels and subgroups.

Rule: of groups 0 and 3-7, take emoji whose label has one or two words, that are drawn in noto, flat and 3d, whose
subgroup has a quota below and whose label is not in NEAR_DUPLICATES. Within a subgroup those that noto v1 ("blob") also
draws come first, then one-word labels, then emojibase's order; the quota cuts. Quotas favour distinct everyday things.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from toprovar.tools.train_demo.captions import grammar_words

GROUPS = (0, 3, 4, 5, 6, 7)
STYLES = ("noto", "blob", "flat", "3d")
REQUIRED_STYLES = ("noto", "flat", "3d")

# emojibase subgroup name -> how many concepts it may give.
QUOTAS = {
    "face-smiling": 1,
    "face-glasses": 1,
    "face-negative": 1,
    "face-costume": 5,
    "heart": 2,
    "animal-mammal": 28,
    "animal-bird": 11,
    "animal-amphibian": 1,
    "animal-reptile": 5,
    "animal-marine": 10,
    "animal-bug": 7,
    "plant-flower": 4,
    "plant-other": 7,
    "food-fruit": 14,
    "food-vegetable": 8,
    "food-prepared": 12,
    "food-asian": 2,
    "food-sweet": 7,
    "drink": 4,
    "place-geographic": 2,
    "place-building": 4,
    "place-religious": 1,
    "place-other": 2,
    "transport-ground": 14,
    "transport-water": 3,
    "transport-air": 4,
    "time": 2,
    "sky-weather": 9,
    "event": 5,
    "award-medal": 1,
    "sport": 6,
    "game": 4,
    "clothing": 9,
    "sound": 1,
    "musical-instrument": 6,
    "computer": 2,
    "phone": 1,
    "light-video": 4,
    "book-paper": 1,
    "money": 1,
    "mail": 1,
    "writing": 2,
    "office": 2,
    "lock": 2,
    "tool": 6,
    "science": 2,
    "household": 4,
}

# Labels whose drawing nearly repeats another concept's, is a scene, or is hard to tell apart at this size.
NEAR_DUPLICATES = frozenset(
    """
    dog|guide dog|service dog|poodle|black cat|cat|tiger|leopard|horse|ox|water buffalo|cow|pig|boar|pig nose
    mouse|rat|rabbit|monkey|ram|goat|camel|mammoth|paw prints|chipmunk|rooster|hatching chick|dove|feather|wing
    black bird|goose|dodo|bird|spouting whale|orca|tropical fish|coral|oyster|spider web|cockroach|fly|microbe
    mosquito|cricket|beetle|bug|white flower|wilted flower|rosette|blossom|hyacinth|herb|empty nest
    leafless tree|fallen leaf|seedling|green apple|melon|mango|lime|tangerine|olive|brown mushroom
    root vegetable|beans|chestnut|ginger root|pea pod|leafy green|onion|potato|bagel|flatbread|stuffed flatbread
    falafel|tamale|burrito|cooking|salt|butter|canned food|sandwich|rice cracker|dumpling|moon cake|shortcake
    shaved ice|custard|pouring liquid|tumbler glass|cocktail glass|clinking glasses|mate|beverage box
    snow-capped mountain|landslide|mount fuji|national park|desert|camping|houses|derelict house|post office
    love hotel|department store|convenience store|office building|hotel|bank|school|building construction|brick
    rock|wood|foggy|cityscape|sunrise|sunset|playground slide|oncoming bus|oncoming taxi|oncoming automobile
    train|tram|tram car|metro|light rail|station|monorail|mountain railway|bullet train|high-speed train
    railway car|trolleybus|minibus|bus stop|motorway|railway track|wheel|construction|articulated lorry
    delivery truck|manual wheelchair|oil drum|motorized wheelchair|motor boat|ferry|passenger ship
    airplane departure|airplane arrival|small airplane|seat|suspension railway|mountain cableway|aerial tramway
    hourglass done|timer clock|stopwatch|full moon|new moon|glowing star|shooting star|milky way|fog|wind face
    cyclone|closed umbrella|comet|water wave|sparkles|sparkler|tanabata tree|pine decoration|confetti ball
    red envelope|reminder ribbon|admission tickets|softball|cricket game|field hockey|ice hockey|lacrosse
    badminton|goal net|running shirt|volleyball|rugby football|spade suit|heart suit|diamond suit|club suit
    chess pawn|joker|clutch bag|purse|shopping bags|woman’s sandal|thong sandal|ballet shoes|man’s shoe
    woman’s clothes|lab coat|safety vest|bikini|briefs|one-piece swimsuit|coat|flat shoe|woman’s boot|shorts
    muted speaker|loudspeaker|long drum|banjo|musical keyboard|fax machine|pager|telephone receiver|low battery
    trackball|optical disk|dvd|computer disk|keyboard|printer|desktop computer|video camera|camera with flash
    diya lamp|open book|green book|blue book|orange book|notebook|ledger|newspaper|rolled-up newspaper|bookmark
    bookmark tabs|label|yen banknote|euro banknote|pound banknote|receipt|incoming envelope|e-mail|outbox tray
    inbox tray|postbox|pen|black nib|memo|file folder|calendar|tear-off calendar|spiral notepad|spiral calendar
    card index|chart increasing|chart decreasing|clipboard|round pushpin|linked paperclips|straight ruler
    triangular ruler|unlocked|old key|pick|crossed swords|link|broken chain|chains|hook|white cane|petri dish
    elevator|mirror|mouse trap|shower|plunger|window|pouting cat|weary cat|crying cat|kissing cat|grinning cat
    alien monster|goblin|love letter|sparkling heart|growing heart|beating heart|revolving hearts|two hearts
    heart decoration|heart exclamation|mending heart|pink heart|orange heart|yellow heart|green heart|blue heart
    purple heart|brown heart|black heart|grey heart|white heart|upside-down face|melting face|winking face
    Japanese dolls|carp streamer|wind chime|firecracker|military medal|baby bottle|sake|badger|water pistol
    slot machine|cigarette|beer mug|wine glass
    """.replace("\n", "|").split("|")
)
_DROPPED = frozenset(label.strip() for label in NEAR_DUPLICATES)

# Everyday names; emojibase says "dog face" where the drawing is simply a dog's head. The label stays as a tag.
RENAMED = {
    "automobile": "car",
    "baby chick": "chick",
    "baguette bread": "baguette",
    "cat face": "cat",
    "cow face": "cow",
    "deciduous tree": "tree",
    "dog face": "dog",
    "evergreen tree": "pine tree",
    "ewe": "sheep",
    "fire engine": "fire truck",
    "game die": "dice",
    "grinning face": "smiley",
    "honeybee": "bee",
    "horse face": "horse",
    "hot beverage": "coffee",
    "hot pepper": "chili",
    "jack-o-lantern": "pumpkin",
    "lady beetle": "ladybug",
    "locked": "padlock",
    "monkey face": "monkey",
    "mouse face": "mouse",
    "pig face": "pig",
    "poultry leg": "chicken leg",
    "rabbit face": "rabbit",
    "tennis": "tennis racket",
    "tiger face": "tiger",
    "twelve-thirty": "clock",
    "two-hump camel": "camel",
}


@dataclass(frozen=True)
class Candidate:
    """One emoji that is drawn in the required styles.

    hexcode: lower-case code points joined by "-", without "fe0f".
    styles:  the styles that draw it, in the order of STYLES.
    """

    label: str
    tags: tuple[str, ...]
    hexcode: str
    subgroup: str
    order: int
    styles: tuple[str, ...]


def bare_hexcode(hexcode: str) -> str:
    """Lower case without the variation selector, which the packages use inconsistently."""
    return "-".join(part for part in hexcode.lower().split("-") if part != "fe0f")


def select(candidates: list[Candidate], scale: float = 1.0) -> list[Candidate]:
    """The concepts, in emojibase's order; `scale` multiplies every quota (rounded, at least 1)."""
    pools: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        if candidate.subgroup in QUOTAS and candidate.label not in _DROPPED and len(candidate.label.split()) <= 2:
            pools[candidate.subgroup].append(candidate)
    chosen: list[Candidate] = []
    for subgroup, pool in pools.items():
        pool.sort(key=lambda c: ("blob" not in c.styles, len(c.label.split()), c.order))
        chosen += pool[: max(1, round(QUOTAS[subgroup] * scale))]
    return sorted(chosen, key=lambda c: c.order)


def concept_names(chosen: list[Candidate]) -> list[str]:
    """Caption names of the concepts: the label, or its everyday name where no other concept has that label."""
    taken = {candidate.label for candidate in chosen}
    names = []
    for candidate in chosen:
        short = RENAMED.get(candidate.label, candidate.label)
        names.append(candidate.label if short in taken else short)
    return [name.casefold() for name in names]


def usable_tags(names: list[str], chosen: list[Candidate]) -> list[list[str]]:
    """Up to six texts that may stand for each name: its label if renamed, then tags of one or two words.

    A tag that another concept has too, that is a word of any name, or that holds a word of the grammar (a colour, a
    number, a style) is left out.
    """
    owners: dict[str, int] = defaultdict(int)
    for candidate in chosen:
        for tag in {t.casefold() for t in (*candidate.tags, candidate.label)}:
            owners[tag] += 1
    words_in_names = {word for name in names for word in (name, *name.split())}
    grammar = {word for text in grammar_words() for word in text.split()}
    result = []
    for name, candidate in zip(names, chosen, strict=True):
        label = candidate.label.casefold()
        texts = [label, *(t.casefold() for t in candidate.tags if len(t.split()) <= 2)]
        keep = [t for t in dict.fromkeys(texts) if t != name and owners[t] == 1 and t not in words_in_names]
        result.append([t for t in keep if not grammar & set(t.split()) and any(c.isalpha() for c in t)][:6])
    return result


def candidates_from(
    emojibase: list[dict[str, Any]], subgroup_names: dict[str, str], drawn: dict[str, set[str]]
) -> list[Candidate]:
    """Joins emojibase's entries with what every style draws.

    drawn: style -> bare hexcodes that it draws.
    """
    result = []
    for entry in emojibase:
        if entry.get("group") not in GROUPS:
            continue
        code = bare_hexcode(entry["hexcode"])
        styles = tuple(style for style in STYLES if code in drawn[style])
        if all(style in styles for style in REQUIRED_STYLES):
            tags = tuple(entry.get("tags", ()))
            subgroup = subgroup_names[str(entry["subgroup"])]
            result.append(Candidate(entry["label"], tags, code, subgroup, entry["order"], styles))
    return result
