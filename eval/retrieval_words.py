"""Two families of words, templates and background texts for `retrieval.py`: one to train on, one to evaluate with.

They share nothing: no word, no template, no text, no seed (a test proves it). Digits, hexadecimal characters and
letters are everybody's.
"""

from __future__ import annotations

import ast
import functools
import random
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass

import texts


@dataclass(frozen=True)
class Needle:
    """How one kind of fact is told and asked for. thing: what it is called. tell: with {key}, {value}. one, many:
    questions, with {key} or {keys}. lead, leads: how their answers begin."""

    thing: str
    tell: str
    one: str
    lead: str
    many: str
    leads: str


@dataclass(frozen=True)
class Chains:
    """Assignments: first with {a}, {v}; then with {b}, {a}; ask and lead with {v}; head before the text."""

    head: str
    first: str
    then: str
    ask: str
    lead: str


@dataclass(frozen=True)
class Listing:
    """Something that is listed: head before it; entry: one line of it; ask and lead: the question and how its answer
    begins. What stands in braces is the task's own."""

    head: str
    entry: str
    ask: str
    lead: str = ""
    many: str = ""
    """The question for several entries at once."""


@dataclass(frozen=True)
class Family:
    """What samples are made of.

    Attributes:
        name: "train" or "eval". seed: mixed into every sample's own. nouns, adjectives, people, syllables: word lists.
        needles, chains, pairs, common, frequent, tables, code, sections: templates, by task.
        noise: short sentences that are repeated as background. sources: modules or texts of the long background.
    """

    name: str
    seed: int
    nouns: tuple[str, ...]
    adjectives: tuple[str, ...]
    people: tuple[str, ...]
    syllables: tuple[str, ...]
    noise: tuple[str, ...]
    columns: tuple[str, ...]
    needles: tuple[Needle, ...]
    chains: tuple[Chains, ...]
    pairs: tuple[Listing, ...]
    common: tuple[Listing, ...]
    frequent: tuple[Listing, ...]
    tables: tuple[Listing, ...]
    code: tuple[Listing, ...]
    sections: tuple[Listing, ...]
    sources: tuple[str, ...]

    @functools.cached_property
    def words(self) -> tuple[str, ...]:
        """Every word of its own."""
        return self.nouns + self.adjectives + self.people + self.syllables + self.columns

    @functools.cached_property
    def templates(self) -> tuple[str, ...]:
        """Every sentence of its own."""
        groups = (self.needles, self.chains, self.pairs, self.common, self.frequent, self.tables, self.code,
                  self.sections)  # fmt: skip
        parts = [part for group in groups for one in group for part in vars(one).values()]
        return tuple(part for part in parts if part) + self.noise

    def sentences(self) -> tuple[str, ...]:
        """Background prose of real texts, in the order of the sources."""
        return _sentences(self.name)


def noun(rng: random.Random, family: Family) -> str:
    return rng.choice(family.nouns)


def compound(rng: random.Random, family: Family) -> str:
    return f"{rng.choice(family.adjectives)}-{rng.choice(family.nouns)}"


def coined(rng: random.Random, family: Family) -> str:
    """A word that nobody has seen."""
    return "".join(rng.choices(family.syllables, k=rng.choice((2, 3, 3, 4))))


def number(rng: random.Random, family: Family) -> str:
    digits = rng.choice((4, 5, 6, 7))
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def long_number(rng: random.Random, family: Family) -> str:
    return str(rng.randrange(10**6, 10**7))


def code(rng: random.Random, family: Family) -> str:
    return f"{''.join(rng.choices(string.ascii_uppercase, k=2))}-{rng.randrange(1000, 10000)}"


def letters(rng: random.Random, family: Family) -> str:
    return "".join(rng.choices(string.ascii_uppercase, k=rng.choice((3, 4, 5))))


def identifier(rng: random.Random, family: Family) -> str:
    """As uuid4 writes it."""
    text = f"{rng.getrandbits(128):032x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def person(rng: random.Random, family: Family) -> str:
    return f"{rng.choice(family.people)} {coined(rng, family).capitalize()}"


@functools.cache
def _sentences(name: str) -> tuple[str, ...]:
    family = FAMILIES[name]
    out: list[str] = []
    for source in family.sources:
        pieces = texts.SOURCES[source]() if source in texts.SOURCES else docstrings(source)
        total = 0
        for piece in pieces:
            # Markup and lines of code make poor sentences; what is left reads as prose.
            for sentence in re.split(r"(?<=[.!?])\s+", re.sub(r"\s+", " ", piece)):
                if (
                    30 <= len(sentence) <= 220
                    and sentence[0].isupper()
                    and sentence[-1] in ".!?"
                    and ">>>" not in sentence
                ):
                    out.append(sentence)
                    total += len(sentence)
            if total > 200_000:
                break
    # Some of the library's texts stand in two places.
    others = set(EVAL.sentences()) if family is TRAIN else set()
    return tuple(sentence for sentence in out if sentence not in others)


def docstrings(module: str) -> Iterator[str]:
    """Of a module of the standard library, from its source."""
    for node in ast.walk(ast.parse(texts._source(module))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield text


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


TRAIN = Family(
    name="train", seed=1_000_003,
    nouns=_split("""
        anchor apron arrow attic badge bakery balcony basket beacon bench blanket boulder bracelet branch brick bridge
        broom bucket buckle button cabin cable camel candle canoe canvas carpet castle cedar ceiling cellar chain chair
        chalk cherry chimney clay cliff clock cloud coat coin comet compass copper coral cotton cradle crane crate creek
        crown cup curtain desert desk diamond dock donkey drawer drum eagle engine falcon farm feather fence ferry
        fiddle field flame flute forest fork fountain fox frame garden gate glacier glove goat grape guitar hammer
        harbor harp hat hedge helmet heron hill hinge honey hook hotel island ivory jacket jar jewel kettle key kite
        knife ladder lake lamp lantern leaf lemon letter library lily lizard lock loom magnet mango map marble market
        meadow melon mill mirror monkey moon moss mountain mug nail needle nest nickel oak oar ocean olive onion orchard
        otter oven owl paddle palace panther paper parrot path peach pearl pebble pencil pepper piano pigeon pillow pine
        pipe pitcher planet plate plow pocket pond poppy prairie pulley pumpkin quarry quilt rabbit raft rail raven reef
        ribbon river robin roof root rope rose rug saddle sail salmon sand scarf"""),
    adjectives=_split("""
        amber ancient angry azure bitter blunt bold brave bright brisk broad bronze calm careful cheap chilly clever
        coarse crimson crisp curious damp daring dark deep dense distant dizzy dry dull dusty eager early elegant empty
        fair faint famous fancy fast fierce firm flat fond formal fragile fresh gentle giant glad golden grand grave
        green grim handsome happy hardy harsh hasty heavy hollow honest humble icy idle jolly keen kind lavish lazy
        light little lively lonely"""),
    people=_split("""
        Adam Agnes Albert Alma Amelia Arthur Beatrice Benjamin Bruno Carla Cedric Clara Daniel Diana Edgar Eleanor Emil
        Esther Felix Fiona Frank Gerda Gloria Harold Helen Hugo Ida Irene Isaac Jakob Jonas Judith Julian Karl Klara
        Laura Leo Lydia Marcus Martha Max"""),
    syllables=_split("""ba bel bor da dan del do fa fen fil ga gar go hal han ka kel kor la lan lem lo ma mar mel mo
        na nel nor"""),
    noise=(
        "Rain fell on the old town all night.", "Nobody opened the window that morning.",
        "The train left on time, as it always did.", "Two children counted the boats on the canal.",
        "Bread was baking somewhere down the street.", "The wind turned a page of the newspaper.",
    ),
    columns=_split("weight city price owner color stock year team phone level floor status size shift"),
    needles=(
        Needle("access code", "The access code of {key} is {value}.", "What is the access code of {key}?",
               "The access code of {key} is", "What are the access codes of {keys}?", "The access codes are"),
        Needle("secret word", "Remember that {key} has the secret word {value}.",
               "Which secret word does {key} have?", "The secret word is", "Which secret words do {keys} have?",
               "The secret words are"),
        Needle("ticket", "Ticket {value} was issued to {key}.", "Which ticket was issued to {key}?", "It was ticket",
               "Which tickets were issued to {keys}?", "These were tickets"),
        Needle("locker", "Note: the locker belonging to {key} opens with {value}.", "What opens the locker of {key}?",
               "", "What opens the lockers of {keys}?", ""),
        Needle("reference", "[{key}] has reference {value}.", "Give the reference of [{key}].", "Reference:",
               "Give all references of {keys}.", "References:"),
        Needle("favorite", "It is well known that the favorite object of {key} is the {value}.",
               "What does {key} like most?", "The", "What do {keys} like most?", ""),
    ),
    chains=(
        Chains("Follow the assignments in this text.", "LET {a} BE {v}.", "LET {b} BE THE SAME AS {a}.",
               "Which names stand for {v}?", "The names that stand for {v} are"),
        Chains("Some boxes and their contents are mentioned below.", "Box {a} holds {v}.",
               "Box {b} holds what box {a} holds.", "Which boxes hold {v}?", "Boxes holding {v}:"),
        Chains("", "set {a} := {v};", "set {b} := {a};", "List every name whose value is {v}.", ""),
        Chains("Track who has which number.", "{a} took the number {v}.", "{b} copied the number of {a}.",
               "Who has the number {v}? Name all of them.", "The number {v} belongs to"),
    ),
    pairs=(
        Listing("Here is a register.", "{key}: {value}", "What does the register say for {key}?", "",
                "What does the register say for {keys}?"),
        Listing("The settings of the machine:", "{key} = {value}", "Which value does the setting {key} have?",
                "{key} =", "Which values do the settings {keys} have?"),
        Listing("", "<{key}>{value}</{key}>", "What stands inside of {key}?", "<{key}>",
                "What stands inside of {keys}?"),
        Listing("Phone book", "{key} ... {value}", "Look up {key}.", "{key} ...", "Look up {keys}."),
        Listing("Each line maps a name to its target.", "{key} => {value}", "Where does {key} lead?", "It leads to",
                "Where do {keys} lead?"),
        Listing("Records follow.", "For {key} we stored {value}.", "What did we store for {key}?", "We stored",
                "What did we store for {keys}?"),
    ),
    common=(
        Listing("Below are votes. Count them.", "vote {i}: {word}", "Which {n} names got the most votes?",
                "The names with the most votes are"),
        Listing("A shopping receipt:", "({i}) {word}", "What are the {n} most frequent items on the receipt?", ""),
        Listing("Words that were heard:", "{i}) {word},", "Name the {n} words that were heard most often.",
                "Most often heard:"),
    ),
    frequent=(
        Listing("A message in a made-up language follows.", "{word}", "Which {n} words occur most in the message?",
                "The words that occur most are"),
        Listing("Signals were recorded:", "{word};", "Which {n} signals came most often?", ""),
    ),
    tables=(
        Listing("The following lines describe items, fields separated by semicolons.", ";",
                "Write the rows with {ids} as JSON, one object a line."),
        Listing("Inventory (tab separated)", "\t", "Return the entries {ids} as JSON objects."),
        Listing("", " / ", "Give me {ids} in JSON."),
    ),
    code=(
        Listing("A JavaScript file:", "function {name}() {{\n  return {value};\n}}",
                "Which value is returned by {name}?", "{name} returns"),
        Listing("These constants are defined.", "const {name} = {value};", "What is the constant {name}?", ""),
        Listing("A shell script is printed here.", "{name}() {{ echo {value}; }}", "What does {name} print?",
                "It prints"),
    ),
    sections=(
        Listing("A travel diary in parts.", "Part {key}\n{items}", "Repeat all lines of part {key} in order.", ""),
        Listing("Recipes", "== {key} ==\n{items}", "What is listed under {key}? Keep the order.", ""),
        Listing("Team sheets follow.", "Team {key}:\n{items}", "Who or what is in team {key}?", "In team {key}:"),
    ),
    sources=("typing", "logging", "unittest.case", "email.message", "http.client", "socket", "ssl", "threading",
             "subprocess", "tempfile", "urllib.request", "shutil", "calendar", "csv", "ctypes.util", "optparse",
             "plistlib", "imaplib", "ftplib", "smtplib", "turtle", "configparser", "gettext", "cmd", "heapq"),
)  # fmt: skip

EVAL = Family(
    name="eval", seed=2_000_029,
    nouns=_split("""
        saffron sandal satchel sausage scale scissors scooter shadow shawl shelf shell shepherd shield shovel shrimp
        shutter signal silver siren skirt slate sleigh slipper snail sofa sparrow spear spice spider spire spoon spring
        squash squirrel stable stadium staircase stamp starling statue steam stone stool stove straw stream street
        sugar suitcase summit swallow swan sword table tailor tambourine tank tapestry teapot temple tent terrace
        thimble thistle thorn thread throne thunder tiger tile timber toad tobacco tomato torch tower tractor trail tray
        treasure tree trophy trousers trout trumpet trunk tulip tunnel turkey turnip turtle umbrella uniform urchin
        valley vase vault velvet vessel village vine vinegar viola violet volcano vulture wagon wallet walnut walrus
        wardrobe warehouse waterfall weasel well whale wharf wheat wheel whistle willow window wire wolf wool wreath
        wrench yacht yarn yogurt zebra zeppelin zinc zipper"""),
    adjectives=_split("""
        long loud loyal lucky lunar massive mellow merry mighty mild misty modern modest mossy muddy narrow neat nimble
        noble noisy odd pale patient plain pleasant polite precious proud pure purple quick quiet rapid rare ready red
        rich ripe robust rough round royal rusty sacred salty scarlet secret sharp shiny shy silent simple sleepy slow
        smooth soft solar solemn solid sour spare steady steep stern sticky strange strong sturdy sunny sweet swift tall
        tender thick thin tidy tiny tired tough vast warm weary wild wise young"""),
    people=_split("""
        Mia Miriam Moritz Nadia Nathan Nelly Nina Noah Nora Olga Oliver Oscar Otto Paula Pedro Petra Philip Quentin
        Rachel Ralph Regina Robert Rosa Ruben Ruth Samuel Sarah Sophie Stefan Susanna Tamara Theodor Thomas Toby Ulrich
        Ursula Valentin Vera Victor Walter Wanda Yvonne"""),
    syllables=_split("""pa per pin po qua ra ren ril ro sa sel sim so ta ter tin to tra va ven vil vo wa wen wil
        wo xe ya yel yo za zel zin zo"""),
    noise=(
        "A dog slept in front of the bookshop.", "The lecture began a little late.",
        "Snow covered every roof before dinner.", "Someone had painted the door blue again.",
    ),
    columns=_split("length country cost keeper shade count month crew branchline grade wing state volume term"),
    needles=(
        Needle("vault number", "The vault number for {key} was set to {value}.",
               "Which vault number was set for {key}?", "The vault number for {key} is",
               "Which vault numbers were set for {keys}?",
               "The vault numbers for {keys} are"),
        Needle("call sign", "During the storm, {key} used the call sign {value}.",
               "What call sign did {key} use during the storm?", "During the storm, {key} used",
               "What call signs did {keys} use during the storm?", "During the storm they used"),
    ),
    chains=(
        Chains("Several containers pass their labels on in the text below.", "Container {a} was labelled {v}.",
               "Container {b} received the label of container {a}.", "Find all containers whose label is {v}.",
               "The containers with label {v} are"),
    ),
    pairs=(
        Listing("The directory below gives one extension per person or object.", "{key} | {value}",
                "Find {key} in the directory and give its extension.", "The extension of {key} is",
                "Find these in the directory and give their extensions: {keys}."),
        Listing("Excerpt from a configuration:", "\"{key}\": \"{value}\",", "What is configured under \"{key}\"?",
                "\"{key}\":", "What is configured under each of {keys}?"),
    ),
    common=(
        Listing("This is a log of visitors.", "#{i} {word}", "Who are the {n} visitors that came most frequently?",
                "The most frequent visitors are"),
    ),
    frequent=(
        Listing("Below is a stream of tags.", "{word} |", "Which {n} tags appear most frequently in the stream?",
                "The most frequent tags are"),
    ),
    tables=(
        Listing("The table lists shipments.", " | ",
                "Convert these rows of the table to JSON, one object per line: {ids}."),
        Listing("A CSV export:", ",", "Extract {ids} from the export as JSON objects, in this order."),
    ),
    code=(
        Listing("The module below defines many small functions.", "def {name}():\n    return {value}\n",
                "What does a call of {name}() give?", "A call of {name}() gives"),
    ),
    sections=(
        Listing("Minutes of several meetings.", "Meeting {key}\n{items}",
                "Reproduce the agenda of meeting {key} in full.", ""),
        Listing("The playlists of a radio station:", "* {key}\n{items}",
                "Which titles are on the playlist {key}, in order?", "The playlist {key} has:"),
    ),
    sources=("reference", "tutorial"),
)  # fmt: skip

FAMILIES = {"train": TRAIN, "eval": EVAL}
