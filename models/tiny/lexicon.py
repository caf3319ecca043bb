"""The words of the corpus: who may appear, where, with what, and the small facts that hold in every text.

Invariants: every entry was made up for this corpus as plain common words, nothing is read from a file or a
data set; a fact is written once here and every template takes it from here, so no two texts contradict.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of character.

    Attributes:
      noun: what it is called, "fox".
      pronouns: "he", "she", or "both" where each individual chooses.
      sound: what it says, or "" for none.
      dwelling: where its kind lives, with a preposition.
      diet: what it eats.
      trick: what it can do, as a bare verb phrase.
    """

    noun: str
    pronouns: str = "both"
    sound: str = ""
    dwelling: str = ""
    diet: str = ""
    trick: str = ""


def _words(text: str, separator: str | None = None) -> tuple[str, ...]:
    return tuple(text.split(separator))


def _rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines()]


ANIMALS: tuple[Kind, ...] = tuple(
    Kind(noun, "both", sound, dwelling, diet, trick)
    for noun, sound, dwelling, diet, trick in _rows(
        """
        cat       | meow    | in a warm house       | fish and milk        | see in the dark
        dog       | woof    | in a warm house       | bones and meat       | follow a smell for miles
        fox       | yip     | in a den              | berries and mice     | run without a sound
        rabbit    |         | in a burrow           | grass and carrots    | hop over a fence
        mouse     | squeak  | in a tiny hole        | cheese and seeds     | slip through a small gap
        bear      | growl   | in a cave             | honey and fish       | sleep all winter
        wolf      | howl    | in the forest         | meat                 | run all night
        owl       | hoot    | in a hollow tree      | mice                 | turn its head far around
        duck      | quack   | on the pond           | bread and weeds      | swim and fly
        frog      | croak   | by the pond           | flies                | jump very far
        cow       | moo     | on a farm             | grass                | give milk
        horse     | neigh   | in a stable           | hay and oats         | pull a heavy cart
        sheep     | baa     | on a hill             | grass                | grow warm wool
        pig       | oink    | on a farm             | corn and apples      | find food under the ground
        hen       | cluck   | on a farm             | seeds                | lay eggs
        goat      | bleat   | on a mountain         | leaves               | climb steep rocks
        donkey    | hee-haw | in a stable           | hay                  | carry heavy bags
        squirrel  |         | in a tall tree        | nuts                 | climb any tree
        hedgehog  |         | under the leaves      | worms                | roll into a ball
        turtle    |         | by the river          | leaves               | hide in its shell
        beaver    |         | in the river          | bark                 | build a dam
        otter     |         | in the river          | fish                 | float on its back
        mole      |         | under the ground      | worms                | dig long tunnels
        crow      | caw     | in a tall tree        | seeds and nuts       | open a locked box
        goose     | honk    | on the pond           | grass                | fly very far
        bee       | buzz    | in a hive             | nectar               | make honey
        ant       |         | in a small hill       | crumbs               | carry ten times its weight
        snail     |         | under a leaf          | leaves               | carry its house on its back
        lion      | roar    | on the plain          | meat                 | jump over a river
        tiger     | roar    | in the jungle         | meat                 | swim well
        elephant  |         | on the plain          | leaves and fruit     | lift a tree with its trunk
        monkey    |         | in the jungle         | bananas              | swing from tree to tree
        parrot    | squawk  | in the jungle         | nuts and fruit       | learn to speak
        penguin   |         | on the ice            | fish                 | dive deep into the sea
        whale     |         | in the sea            | small fish           | hold its breath for an hour
        dolphin   | click   | in the sea            | fish                 | leap high out of the water
        crab      |         | on the beach          | weeds                | walk sideways
        """
    )
)

OTHERS: tuple[Kind, ...] = (
    *(Kind(noun, "he") for noun in ("boy", "king", "prince", "old man", "wizard")),
    *(Kind(noun, "she") for noun in ("girl", "queen", "princess", "old woman", "witch")),
    *(
        Kind(noun)
        for noun in ("shoemaker", "farmer", "sailor", "gardener", "miller", "painter", "teacher")
    ),
    *(Kind(noun) for noun in ("dragon", "giant", "robot", "troll", "ghost", "snowman")),
)
KINDS = ANIMALS + OTHERS

NAMES: dict[str, tuple[str, ...]] = {
    "he": _words(
        "Tom Ben Max Sam Leo Finn Oscar Hugo Jack Peter Otto Felix Milo Theo Arthur Henry Bruno Emil Noah "
        "Rufus Simon Toby Walter Pip"
    ),
    "she": _words(
        "Anna Mia Lily Rosa Ella Nora Ruby Clara Ida Maya Alice Emma Greta Hazel Ivy Julia Lucy Molly Olive "
        "Poppy Sara Tilly Vera Wren"
    ),
}

TRAITS = _words(
    "small brave shy curious clever kind gentle quiet cheerful hungry sleepy young lonely proud careful "
    "honest patient lazy merry wise"
)
COLOURS = _words("red blue green yellow white black brown golden silver purple orange grey")
OBJECTS = _words(
    "kite ball hat scarf bell book lamp key boat drum cup box coat ribbon button flute basket blanket map "
    "umbrella ring balloon feather wagon clock"
)
FOODS = _words(
    "apple pie|bread|honey cake|carrot soup|cheese|plum jam|oat porridge|cherry pie|berry tart|nut bread|pea soup|"
    "roasted corn|rice pudding|ginger cake",
    "|",
)
PLACES: tuple[tuple[str, str], ...] = (
    *(
        ("in", noun)
        for noun in ("garden", "forest", "kitchen", "barn", "meadow", "cave", "attic", "library")
    ),
    *(("in", noun) for noun in ("old tower", "orchard", "village square", "school")),
    *(("by", noun) for noun in ("river", "lake", "well", "mill", "sea", "pond", "garden gate")),
    *(("at", noun) for noun in ("market", "harbour", "station", "bakery")),
    *(("on", noun) for noun in ("hill", "beach", "roof", "island")),
    *(("under", noun) for noun in ("stone bridge", "big oak tree", "apple tree", "stairs")),
    *(("behind", noun) for noun in ("waterfall", "shed", "church", "stone wall")),
)
HOMES = tuple(
    f"in a {size} {what} {where}"
    for size in ("small", "cosy", "little", "quiet", "round")
    for what in ("house", "cottage", "hut", "home")
    for where in (
        "by the river",
        "near the forest",
        "on a green hill",
        "at the edge of the village",
        "by the sea",
    )
)
SEASONS = ("spring", "summer", "autumn", "winter")
NUMBERS = _words("zero one two three four five six seven eight nine ten eleven twelve")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words(
    "January February March April May June July August September October November December"
)

COLOUR_OF: tuple[tuple[str, str], ...] = (
    *((noun, "blue") for noun in ("the sky", "the sea")),
    *((noun, "green") for noun in ("grass", "a leaf", "a frog")),
    *((noun, "white") for noun in ("snow", "milk", "a cloud", "salt")),
    *((noun, "yellow") for noun in ("a lemon", "the sun", "a banana", "butter")),
    *((noun, "red") for noun in ("a tomato", "a strawberry", "blood")),
    *((noun, "orange") for noun in ("a carrot", "a pumpkin", "an orange")),
    *((noun, "black") for noun in ("coal", "the night", "a crow")),
    *((noun, "brown") for noun in ("chocolate", "mud", "a bear")),
    *((noun, "grey") for noun in ("an elephant", "a stone", "smoke")),
    *((noun, "purple") for noun in ("a plum", "a violet")),
)
OPPOSITES: tuple[tuple[str, str], ...] = tuple(
    (left, right)
    for left, right in _rows(
        """
        hot | cold
        big | small
        day | night
        up | down
        fast | slow
        wet | dry
        old | young
        happy | sad
        open | closed
        full | empty
        light | dark
        loud | quiet
        left | right
        hard | soft
        early | late
        high | low
        """
    )
)
LEGS: tuple[tuple[str, str], ...] = (
    *(
        (noun, "four")
        for noun in ("a dog", "a cat", "a horse", "a cow", "a sheep", "a pig", "a goat", "a fox")
    ),
    *((noun, "two") for noun in ("a hen", "a duck", "a goose", "an owl", "a crow", "a penguin")),
    *((noun, "six") for noun in ("a bee", "an ant")),
    ("a spider", "eight"),
    ("a crab", "ten"),
    ("a fish", "no"),
)
GROUPS: dict[str, tuple[str, ...]] = {
    "fruits": _words("apple pear plum cherry banana lemon orange peach grape melon"),
    "vegetables": _words("carrot pea bean onion potato cabbage pumpkin leek turnip corn"),
    "animals": _words("cat dog fox bear cow horse sheep owl frog rabbit"),
    "birds": _words("owl crow duck goose hen parrot penguin robin swan gull"),
    "colours": _words("red blue green yellow white black brown purple orange grey"),
    "flowers": _words("rose tulip lily daisy violet poppy"),
    "trees": _words("oak pine birch willow maple elm"),
    "tools": _words("hammer saw spade axe rake needle"),
    "drinks": _words("water milk tea juice coffee cocoa"),
    "clothes": _words("hat coat scarf shirt sock shoe glove"),
    "days": DAYS,
    "months": MONTHS,
}
SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello", "Hello!", "Hi", "Good morning"), "Hello! Would you like to hear a story?"),
    (("Who are you?", "What are you?"), "I am a very small model. I tell short stories."),
    (
        ("What can you do?", "Can you help me?"),
        "I can tell a story, make a list, and answer easy questions.",
    ),
    (("How are you?", "How are you today?"), "I am well, thank you. Shall I tell you a story?"),
    (("Thank you", "Thanks", "Thank you!"), "You are welcome."),
    (("Goodbye", "Good night", "Bye"), "Good night, and sweet dreams."),
    (
        ("Who wrote your stories?", "Where do your stories come from?"),
        "They come from a small set of rules and words.",
    ),
)


def with_article(noun: str) -> str:
    """Returns the noun, or adjective and noun, with "a" or "an" before it."""
    return f"an {noun}" if noun.startswith(("a", "e", "i", "o", "u", "honest")) else f"a {noun}"
