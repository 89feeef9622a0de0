"""What the synthetic choice task asks about: 64 topics of five answers each, and ten ways to ask."""

from __future__ import annotations

from typing import NamedTuple


class Topic(NamedTuple):
    """A noun and its five answers. The order of the answers is the order of the categories."""

    singular: str
    plural: str
    options: tuple[str, str, str, str, str]


TEMPLATES = (
    "Name one of the five {plural}[: {options}].",
    "Which of the five {plural}[, {options},] comes to mind?",
    "Pick any one of the five {plural}[ from this list: {options}].",
    "Choose a single {singular}[ out of {options}].",
    "Tell me one {singular}[ among {options}].",
    "Of the five {plural}[, namely {options}], which one would you choose?",
    "I need one {singular}[; the options are {options}]. Which should I take?",
    "Think of the five {plural}[: {options}]. Now say one of them.",
    "If you had to settle on one of the five {plural}[, which are {options}], which would it be?",
    "Please answer with one of the five {plural}[, that is, {options}].",
)
"""The closed-set form keeps the clause in brackets, the open-set form drops it."""

SHOTS = (
    (
        Topic("working day", "working days", ("Wednesday", "Monday", "Tuesday", "Thursday", "Friday")),
        "Friday",
    ),
    (Topic("clothing size", "clothing sizes", ("small", "tiny", "large", "medium", "huge")), "medium"),
)
"""Worked examples of a few-shot prompt, with their answers. None of the topics is among them."""

TOPICS = (
    Topic("ocean", "oceans", ("Pacific", "Atlantic", "Indian", "Southern", "Arctic")),
    Topic("Great Lake", "Great Lakes", ("Superior", "Michigan", "Huron", "Erie", "Ontario")),
    Topic("inhabited continent", "inhabited continents", ("Europe", "Asia", "Africa", "America", "Oceania")),
    Topic(
        "borough of New York City",
        "boroughs of New York City",
        ("Manhattan", "Brooklyn", "Queens", "Bronx", "Staten Island"),
    ),
    Topic("Nordic country", "Nordic countries", ("Sweden", "Norway", "Denmark", "Finland", "Iceland")),
    Topic(
        "Central Asian country",
        "Central Asian countries",
        ("Kazakhstan", "Uzbekistan", "Kyrgyzstan", "Tajikistan", "Turkmenistan"),
    ),
    Topic("BRICS founder", "BRICS founders", ("China", "India", "Russia", "Brazil", "South Africa")),
    Topic("Maghreb country", "Maghreb countries", ("Morocco", "Algeria", "Tunisia", "Libya", "Mauritania")),
    Topic("US Gulf state", "US Gulf states", ("Texas", "Florida", "Louisiana", "Alabama", "Mississippi")),
    Topic(
        "US Pacific state", "US Pacific states", ("California", "Hawaii", "Oregon", "Washington", "Alaska")
    ),
    Topic(
        "main island of Japan",
        "main islands of Japan",
        ("Honshu", "Hokkaido", "Kyushu", "Shikoku", "Okinawa"),
    ),
    Topic("naked-eye planet", "naked-eye planets", ("Mars", "Venus", "Jupiter", "Saturn", "Mercury")),
    Topic("dwarf planet", "dwarf planets", ("Pluto", "Ceres", "Eris", "Haumea", "Makemake")),
    Topic(
        "major moon of Uranus", "major moons of Uranus", ("Titania", "Oberon", "Miranda", "Ariel", "Umbriel")
    ),
    Topic(
        "layer of the atmosphere",
        "layers of the atmosphere",
        ("troposphere", "stratosphere", "mesosphere", "thermosphere", "exosphere"),
    ),
    Topic("sense", "senses", ("sight", "hearing", "touch", "taste", "smell")),
    Topic("basic taste", "basic tastes", ("sweet", "salty", "sour", "bitter", "umami")),
    Topic("finger", "fingers", ("thumb", "index", "middle", "ring", "little")),
    Topic(
        "kind of blood vessel",
        "kinds of blood vessels",
        ("artery", "vein", "capillary", "arteriole", "venule"),
    ),
    Topic("vertebrate class", "vertebrate classes", ("mammals", "birds", "fish", "reptiles", "amphibians")),
    Topic("food group", "food groups", ("fruit", "vegetables", "grains", "protein", "dairy")),
    Topic(
        "stage of grief",
        "stages of grief",
        ("denial", "anger", "bargaining", "depression", "acceptance"),
    ),
    Topic("core emotion", "core emotions", ("joy", "sadness", "anger", "fear", "disgust")),
    Topic("nucleobase", "nucleobases", ("adenine", "guanine", "cytosine", "thymine", "uracil")),
    Topic("halogen", "halogens", ("chlorine", "fluorine", "iodine", "bromine", "astatine")),
    Topic(
        "Platonic solid",
        "Platonic solids",
        ("cube", "tetrahedron", "octahedron", "dodecahedron", "icosahedron"),
    ),
    Topic("Chinese element", "Chinese elements", ("fire", "water", "earth", "wood", "metal")),
    Topic("Olympic ring color", "Olympic ring colors", ("blue", "red", "green", "yellow", "black")),
    Topic("book of Moses", "books of Moses", ("Genesis", "Exodus", "Leviticus", "Numbers", "Deuteronomy")),
    Topic("pillar of Islam", "pillars of Islam", ("prayer", "fasting", "charity", "pilgrimage", "faith")),
    Topic(
        "French mother sauce",
        "French mother sauces",
        ("hollandaise", "tomato", "bechamel", "veloute", "espagnole"),
    ),
    Topic(
        "chess piece other than the pawn",
        "chess pieces other than the pawn",
        ("queen", "king", "knight", "bishop", "rook"),
    ),
    Topic(
        "basketball position",
        "basketball positions",
        ("point guard", "shooting guard", "small forward", "power forward", "center"),
    ),
    Topic(
        "original Nobel Prize",
        "original Nobel Prizes",
        ("peace", "physics", "literature", "chemistry", "medicine"),
    ),
    Topic(
        "classical order of architecture",
        "classical orders of architecture",
        ("Doric", "Ionic", "Corinthian", "Tuscan", "Composite"),
    ),
    Topic(
        "member of the Simpson family",
        "members of the Simpson family",
        ("Homer", "Bart", "Marge", "Lisa", "Maggie"),
    ),
    Topic("Bennet sister", "Bennet sisters", ("Elizabeth", "Jane", "Lydia", "Mary", "Kitty")),
    Topic("Spice Girl", "Spice Girls", ("Posh", "Scary", "Sporty", "Ginger", "Baby")),
    Topic(
        "member of the Scooby-Doo gang",
        "members of the Scooby-Doo gang",
        ("Scooby", "Shaggy", "Velma", "Daphne", "Fred"),
    ),
    Topic(
        "modern pentathlon sport",
        "modern pentathlon sports",
        ("fencing", "swimming", "riding", "shooting", "running"),
    ),
    Topic("D-Day beach", "D-Day beaches", ("Omaha", "Utah", "Gold", "Juno", "Sword")),
    Topic("safari animal", "safari animals", ("lion", "elephant", "leopard", "buffalo", "rhinoceros")),
    Topic("Marx Brother", "Marx Brothers", ("Groucho", "Harpo", "Chico", "Zeppo", "Gummo")),
    Topic("Iroquois nation", "Iroquois nations", ("Mohawk", "Seneca", "Oneida", "Onondaga", "Cayuga")),
    Topic("US coin", "US coins", ("penny", "quarter", "dime", "nickel", "half dollar")),
    Topic(
        "major Romance language",
        "major Romance languages",
        ("Spanish", "French", "Italian", "Portuguese", "Romanian"),
    ),
    Topic("great ape", "great apes", ("gorilla", "chimpanzee", "orangutan", "bonobo", "human")),
    Topic("big cat", "big cats", ("lion", "tiger", "leopard", "jaguar", "cheetah")),
    Topic("bird of prey", "birds of prey", ("eagle", "hawk", "falcon", "owl", "vulture")),
    Topic("citrus fruit", "citrus fruits", ("orange", "lemon", "lime", "grapefruit", "mandarin")),
    Topic("time of day", "times of day", ("morning", "evening", "night", "afternoon", "noon")),
    Topic(
        "room of a house",
        "rooms of a house",
        ("kitchen", "bedroom", "bathroom", "living room", "dining room"),
    ),
    Topic(
        "orchestral string instrument",
        "orchestral string instruments",
        ("violin", "cello", "viola", "harp", "double bass"),
    ),
    Topic("tech giant", "tech giants", ("Google", "Apple", "Microsoft", "Amazon", "Meta")),
    Topic("dairy product", "dairy products", ("milk", "cheese", "butter", "yogurt", "cream")),
    Topic("common metal", "common metals", ("iron", "gold", "silver", "copper", "tin")),
    Topic("common tree", "common trees", ("oak", "pine", "maple", "birch", "cedar")),
    Topic("garden flower", "garden flowers", ("rose", "tulip", "daisy", "lily", "sunflower")),
    Topic("farm animal", "farm animals", ("cow", "pig", "sheep", "horse", "goat")),
    Topic("household pet", "household pets", ("dog", "cat", "rabbit", "hamster", "parrot")),
    Topic("precious stone", "precious stones", ("diamond", "ruby", "emerald", "sapphire", "opal")),
    Topic("simple shape", "simple shapes", ("circle", "square", "triangle", "rectangle", "oval")),
    Topic("team sport", "team sports", ("football", "basketball", "hockey", "rugby", "cricket")),
    Topic("nut", "nuts", ("almond", "walnut", "cashew", "pistachio", "hazelnut")),
)
