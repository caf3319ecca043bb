"""The plots: sentence templates that together tell one small story each.

Invariants: a plot is a sequence of slots, a slot a tuple of alternatives of equal meaning, so any choice in one slot
fits any choice in the next; "" may be an alternative.  Fields in braces are filled from one `Cast`, which stays the
same for the whole story: {N} the hero, {k} its kind, {he} {him} {his} {He} {His}; {M} the friend with {fk} {fhe} {fhim}
{fhis} {fHe}; {thing} a coloured object, {obj} without its colour; {p1} {p2} {p3} places ("by the river"), {t1} {t2} {t3}
the same as goals ("to the river"), {n2} without a preposition; {food}.  All templates were written for this corpus.
"""

from __future__ import annotations

import dataclasses

Slot = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Plot:
    """What happens, and what can be asked about it afterwards.

    Attributes:
      title: template of a title.
      slots: what happens, a slot a sentence or two; "\\n" starts a new paragraph.
      questions: templates (question, answer) that only this plot can answer.
    """

    title: str
    slots: tuple[Slot, ...]
    questions: tuple[tuple[str, str], ...] = ()


_LOST = Plot(
    "{N} and the Lost {Obj}",
    (
        (
            "{N} had {a_thing} that {he} loved very much.",
            "The best thing {N} owned was {a_thing}.",
            "{N} had {a_thing}, a gift from {his} grandmother.",
        ),
        (
            "One morning, the {obj} was gone.",
            "One day, {he} could not find the {obj} anywhere.",
            "But one evening, the {thing} was not in its place.",
        ),
        ("\n",),
        (
            "{N} looked {p1}, but the {obj} was not there.",
            "First {he} searched {p1}. There was no {obj}.",
            '"Maybe I left it {p1}," thought {N}. But it was not there.',
        ),
        (
            "Then {he} looked {p2}, but found only an old shoe.",
            "Then {he} went {t2} and looked under every stone. Nothing.",
            "After that {he} looked {p2}, and again there was nothing.",
        ),
        ("{He} sat down and began to cry.", "{N} felt very sad.", "{N} did not know what to do."),
        ("\n",),
        (
            '{M} the {fk} came by. "Why are you so sad?" asked {M}.',
            'Just then {his} friend {M} the {fk} came along. "What is wrong?" asked {M}.',
        ),
        (
            '"I have lost my {thing}," said {N}.',
            '"My {thing} is gone," said {N} in a small voice.',
            '"I cannot find my {thing}," {N} answered.',
        ),
        (
            '"Do not worry," said {M}. "I saw something {colour} {p3}."',
            '"Let us look together," said {M}. "Did you look {p3}?"',
            '"I will help you," said {M}. "Let us try {p3}."',
        ),
        ("\n",),
        (
            "So they went {t3}. And there, in the grass, lay the {thing}!",
            "They ran {t3}, and there was the {thing}, wet but not broken.",
            "Together they walked {t3}. The {obj} was there, safe and sound.",
        ),
        (
            '"Thank you, {M}!" cried {N}, and {he} hugged {his} friend.',
            '"You are the best friend in the world," said {N}.',
            '{N} danced for joy. "Thank you, {M}," {he} said.',
        ),
    ),
    (
        ("What did {N} lose?", "{N} lost {a_thing}."),
        ("Where was the {obj}?", "The {obj} was {p3}."),
        ("Who helped {N}?", "{M} the {fk} helped {N}."),
    ),
)

_BAKING = Plot(
    "{N} Makes {Food}",
    (
        (
            "One {season} day, {N} wanted to make some {food}.",
            "It was a cold day, and {N} was hungry. {He} wanted to make some {food}.",
            "{N} loved to cook, and most of all {he} loved to make {food}.",
        ),
        (
            "But the shelf in the kitchen was empty.",
            "But there was nothing left in the kitchen.",
            "But {he} did not have what {he} needed.",
        ),
        ("\n",),
        (
            "So {N} took {his} {thing} and went {t1}.",
            "So {he} put on a coat and walked {t1}.",
            "{N} took a basket and went {t1}.",
        ),
        (
            "There {he} met {M} the {fk}.",
            "{M} the {fk} was already there.",
            "On the way {he} met {M} the {fk}.",
        ),
        (
            '"I have some milk," said {M}, "but I have no eggs."',
            '"I have butter and flour," said {M}, "but it is not enough for me."',
            '"I was about to cook too," said {M}, "but I have only half of what I need."',
        ),
        (
            '"I have the rest," said {N}. "Let us cook together!"',
            '"Then we can share," said {N}. "Come to my house!"',
        ),
        ("\n",),
        (
            "They mixed and stirred, and soon the whole house smelled sweet.",
            "They lit the fire, and {M} stirred while {N} sang.",
            "{N} washed the bowls and {M} watched the fire.",
        ),
        (
            "When it was ready, they ate the {food} by the window.",
            "The {food} was so good that they ate it all.",
            "They ate the {food} while it was still warm.",
        ),
        (
            '"It tastes better when there are two of us," said {M}.',
            '"Next week we will do it again," said {N}.',
            '"This is the best {food} I have ever had," said {M}.',
        ),
    ),
    (
        ("What did {N} make?", "{N} made some {food}."),
        ("Who cooked with {N}?", "{M} the {fk} cooked with {N}."),
    ),
)

_JOURNEY = Plot(
    "The Long Walk of {N}",
    (
        (
            "All {his} life, {N} had wanted to see what was {p3}.",
            "{N} had heard that something wonderful was hidden {p3}.",
            "An old story said that {a_thing} was hidden {p3}, and {N} wanted to find it.",
        ),
        (
            "So one morning {he} packed some {food} and set off.",
            "One day {he} packed a bag with {food} and closed the door.",
        ),
        ("\n",),
        (
            "First {he} came {t1}. It was so quiet there that {he} could hear {his} own steps.",
            "First {he} walked {t1}, where the wind was strong.",
            "By noon {he} was {p1}, and {his} feet were tired.",
        ),
        (
            "There {he} met {M} the {fk}, who was lost.",
            "There sat {M} the {fk}, all alone.",
        ),
        (
            '"Come with me," said {N}. "Two are braver than one."',
            '"Would you like to come along?" asked {N}. "I have enough {food} for two."',
        ),
        ("\n",),
        (
            "Then they walked on {t2}. It began to rain, and they hid under a big leaf.",
            "In the evening they came {t2} and made a small fire.",
            "They slept {p2}, and the stars were very bright.",
        ),
        (
            "In the dark they heard a strange noise, but {M} was not afraid.",
            "{M} told a funny story, and they both laughed.",
            "{N} shared the {food}, and they felt warm again.",
        ),
        ("\n",),
        (
            "The next day they reached the end of the road. And there, {p3}, they found {a_thing}.",
            "At last they stood {p3}. Something was shining there. It was {a_thing}!",
        ),
        (
            '"It is yours," said {M}. "No," said {N}, "it is ours."',
            '"We found it together," said {N}, "so we will keep it together."',
        ),
    ),
    (
        ("What did they find?", "They found {a_thing}."),
        ("Where was the {obj}?", "The {obj} was {p3}."),
        ("Whom did {N} meet?", "{N} met {M} the {fk}."),
    ),
)

_STORM = Plot(
    "The Night of the Storm",
    (
        (
            "One {season} night, a great storm came.",
            "One evening the sky turned black, and the wind began to blow.",
            "It was a dark night, and the rain fell harder and harder.",
        ),
        (
            "{N} closed the windows and lit a lamp.",
            "{N} sat by the fire and listened to the thunder.",
            "{N} hid under a blanket and counted to ten.",
        ),
        ("\n",),
        (
            "Knock, knock! Somebody was at the door.",
            "Then there was a knock at the door.",
            "Suddenly {he} heard a voice outside.",
        ),
        (
            'It was {M} the {fk}, cold and wet. "The wind has blown my roof away," said {M}.',
            'There stood {M} the {fk}. "The water has come into my house," said {M}. "May I come in?"',
        ),
        (
            '"Come in, come in!" said {N}. "There is room for two."',
            '"Of course," said {N}. "Come and sit by the fire."',
        ),
        (
            "{He} gave {M} a dry blanket and some {food}.",
            "{N} made some {food}, and soon {M} was warm again.",
        ),
        ("\n",),
        (
            "All night they told stories and did not hear the thunder any more.",
            "They played games until the storm was over.",
            "They talked and laughed, and the storm did not seem so bad.",
        ),
        (
            "In the morning the sun came out, and everything was bright and clean.",
            "When morning came, the sky was blue again.",
        ),
        (
            "{N} helped {M} to build a new roof.",
            "They went {t1} to find some wood, and {N} helped {M} to mend the house.",
        ),
        (
            "To say thank you, {M} gave {N} {a_thing}.",
            '"Take this {thing}," said {M}. "It will remind you of me."',
        ),
    ),
    (
        ("Who knocked at the door?", "It was {M} the {fk}."),
        ("What did {M} give to {N}?", "{M} gave {N} {a_thing}."),
    ),
)

_RACE = Plot(
    "The Great Race",
    (
        (
            "Every {season} there was a big race {p1}.",
            "One day a race was held {p1}, and everybody came to watch.",
        ),
        (
            "The winner would get {a_thing}.",
            "The prize was {a_thing}.",
        ),
        (
            '"I am too slow," said {N}, "but I will try."',
            "{N} had never won anything, but {he} wanted to try.",
        ),
        (
            '{M} the {fk} laughed. "I am the fastest of all," {fhe} said.',
            '"Nobody is faster than I am," said {M} the {fk}.',
        ),
        ("\n",),
        (
            '"One, two, three, go!" They all began to run.',
            "A bell rang, and off they went.",
        ),
        (
            "Soon {M} was far ahead. {N} ran slowly, but {he} did not stop.",
            "{M} ran like the wind, and {N} was the last of all.",
        ),
        (
            "But {p2}, {M} tripped over a root and fell.",
            "But when {M} came {t2}, {fhe} slipped in the mud and hurt a foot.",
        ),
        ("\n",),
        (
            'Everybody ran past. Only {N} stopped. "Are you hurt?" {he} asked.',
            "The others ran on, but {N} stopped to help.",
        ),
        (
            '"Go on, or you will lose," said {M}. "I do not mind," said {N}. "Lean on me."',
            '"Why do you help me?" asked {M}. "Because you need help," said {N}.',
        ),
        (
            "So they walked to the end together, slow step by slow step.",
            "They came in last, side by side.",
        ),
        ("\n",),
        (
            "But all the people clapped, and the {thing} was given to {N}.",
            '"The {thing} goes to the one with the biggest heart," said the judge, and gave it to {N}.',
        ),
        (
            '"I am sorry that I laughed," said {M}, and from that day on they were friends.',
            "{M} was ashamed and never laughed at anyone again.",
        ),
    ),
    (
        ("What was the prize?", "The prize was {a_thing}."),
        ("Who fell?", "{M} the {fk} fell."),
        ("Who won the prize?", "{N} won the prize."),
    ),
)

_SEED = Plot(
    "{N} Plants a Seed",
    (
        (
            "In {season}, {N} found a small seed {p1}.",
            "One day {N} found a tiny seed {p1}.",
        ),
        (
            "{He} put it into the ground and gave it some water.",
            "{He} dug a little hole, put the seed in it, and covered it with earth.",
        ),
        ("\n",),
        (
            "{N} waited one day. Nothing happened. {He} waited two days. Still nothing happened.",
            "Every day {he} went to look, but there was only earth.",
        ),
        (
            '"It will never grow," said {M} the {fk}.',
            '{M} the {fk} shook {fhis} head. "That seed is too old," {fhe} said.',
        ),
        (
            '"I will wait a little longer," said {N}.',
            "But {N} did not give up.",
            '"Good things take time," said {N}.',
        ),
        ("\n",),
        (
            "Then, one morning, there was a small green leaf.",
            "At last, after many days, something green came out of the ground.",
        ),
        (
            "The plant grew and grew until it was as tall as {N}.",
            "It grew up to the window, and then up to the roof.",
        ),
        (
            "It had one big {colour} flower, and everybody came to see it.",
            "Soon it was full of {colour} flowers, and the bees came from far away.",
        ),
        ("\n",),
        (
            '"I was wrong," said {M}. "May I have a seed too?"',
            '"It is beautiful," said {M}. "Will you teach me how to do it?"',
        ),
        (
            '"Of course," said {N}, and they planted the next one together.',
            "{N} gave {M} ten seeds and {a_thing} to carry them in.",
        ),
    ),
    (
        ("What did {N} find?", "{N} found a seed."),
        ("Where did {N} find the seed?", "{N} found the seed {p1}."),
        ("What colour were the flowers?", "The flowers were {colour}."),
    ),
)

_TRADE = Plot(
    "The Clever Trade",
    (
        (
            "One morning {N} went {t1} with {a_thing}.",
            "{N} had only one thing in the world, and that was {a_thing}. {He} took it and went {t1}.",
        ),
        (
            "{He} wanted to trade it for some {food}.",
            "{He} was hungry and wanted to trade the {obj} for {food}.",
        ),
        ("\n",),
        (
            '{M} the {fk} saw it. "What a fine {obj}!" said {M}. "I will give you my {thing2} for it."',
            '"I need {a_obj}," said {M} the {fk}. "Will you take my {thing2} for it?"',
        ),
        (
            "{N} thought for a while, and then they traded.",
            '"Yes," said {N}, and they shook hands.',
        ),
        (
            "{M} was happy with the {thing}, and {N} went on with the {thing2}.",
            "So now {M} had the {thing} and {N} had the {thing2}.",
        ),
        ("\n",),
        (
            "{p2c}, {N} met a baker who was crying.",
            "Then {N} went {t2}. There sat a sad baker.",
        ),
        (
            '"If only I had {a_obj2}," said the baker, "I could work again."',
            '"I have lost my {obj2}," said the baker, "and without it I cannot work."',
        ),
        (
            '"Take this one," said {N}. "You need it more than I do."',
            '"Here is {a_obj2}," said {N}. "It is yours."',
        ),
        ("\n",),
        (
            "The baker was so happy that {N} got as much {food} as {he} could carry.",
            '"Then you shall have {food} from me every day," said the baker.',
        ),
        (
            "That evening {N} shared the {food} with {M}, and both of them laughed.",
            "{N} ran to find {M}, and they ate the {food} together.",
        ),
    ),
    (
        ("What did {N} give to {M}?", "{N} gave {M} the {thing}."),
        ("What did {N} give to the baker?", "{N} gave the baker the {thing2}."),
        ("What did {N} get from the baker?", "{N} got some {food}."),
    ),
)

_SOUND = Plot(
    "The Strange Sound",
    (
        (
            "One night {N} heard a strange sound. It came from somewhere {p1}.",
            "In the middle of the night, something went bump {p1}.",
        ),
        (
            '"Who is there?" asked {N}. Nobody answered.',
            "{He} held {his} breath and listened. There it was again.",
        ),
        (
            "{N} was afraid, but {he} took a lamp and went to look.",
            '"I must be brave," said {N}, and {he} took a lamp.',
        ),
        ("\n",),
        (
            "{He} went {t1}. There was nothing but a long shadow.",
            "{He} walked {t1} on the tips of {his} toes, but nobody was there.",
        ),
        (
            "The sound came again, and now it came from {n2}.",
            "Then the sound moved away, and {N} followed it {t2}.",
        ),
        ("\n",),
        (
            "{N} held up the lamp. Two big eyes looked at {him}!",
            "Something moved in the dark. {N} wanted to run away.",
        ),
        (
            'But it was only {M} the {fk}. "I am sorry," said {M}. "I was looking for my {thing}."',
            '"Please do not be angry," said a small voice. It was {M} the {fk}. "I have dropped my {thing}."',
        ),
        (
            '{N} began to laugh. "I thought that you were a monster!"',
            '"And I was afraid of you!" said {N}.',
        ),
        ("\n",),
        (
            "With the lamp it was easy to find the {obj}. It was {p3}.",
            "They looked together, and soon they found the {thing} {p3}.",
        ),
        (
            "Then they drank some warm milk and watched the moon.",
            "After that {M} came to visit every week, but always by day.",
        ),
    ),
    (
        ("Who made the sound?", "It was {M} the {fk}."),
        ("What was {M} looking for?", "{M} was looking for {a_thing}."),
        ("Where was the {obj}?", "The {obj} was {p3}."),
    ),
)

_LEARN = Plot(
    "{N} Learns Something New",
    (
        (
            "{N} wanted to learn how to {skill}, but {he} did not know how.",
            "Everybody {p1} could {skill}. Only {N} could not.",
        ),
        (
            '"I will never learn it," said {N}.',
            '"It is too hard for me," said {N} with a sigh.',
        ),
        ("\n",),
        (
            'One day {he} met {M} the {fk}, who could {skill} very well. "Will you teach me?" asked {N}.',
            '{M} the {fk} heard it. "I can {skill}," said {M}. "Shall I teach you?"',
        ),
        (
            '"Yes," said {M}, "but you must practise every day."',
            '"It is not hard," said {M}, "if you try again and again."',
        ),
        ("\n",),
        (
            "On Monday {N} tried, and it went wrong. On Tuesday {he} tried again, and it went wrong again.",
            "The first time, {N} fell on {his} nose. The second time, it was a little better.",
        ),
        (
            '"Once more," said {M}. "You are doing well."',
            'But {M} only smiled and said, "Try again."',
        ),
        (
            "They practised {p1} in the morning and {p2} in the evening.",
            "They practised {p2}, where nobody could see them.",
        ),
        ("\n",),
        (
            "And on Sunday, {N} could do it! {He} could really {skill}!",
            "And then, one day, it worked. {N} could {skill}!",
        ),
        (
            '"I knew that you could do it," said {M}, and gave {him} {a_thing}.',
            "{N} was so proud that {he} showed it to everybody, and {M} gave {him} {a_thing}.",
        ),
    ),
    (
        ("What did {N} learn?", "{N} learned how to {skill}."),
        ("Who taught {N}?", "{M} the {fk} taught {N}."),
    ),
)

_PARTY = Plot(
    "A Surprise for {N}",
    (
        (
            "It was the birthday of {N}, but nobody seemed to remember it.",
            "{N} woke up and smiled. Today was {his} birthday!",
        ),
        (
            "{He} went {t1}, but nobody was there.",
            "{He} walked {t1}. It was empty and quiet.",
        ),
        (
            "{He} went {t2}, but nobody was there either.",
            "Then {he} looked {p2}. There was no one.",
        ),
        (
            '"They have all forgotten me," said {N}.',
            '"Maybe nobody likes me," thought {N}.',
        ),
        ("\n",),
        (
            'On the way home {he} met {M} the {fk}. "Come with me," said {M}. "I need your help {p3}."',
            '{M} the {fk} came running. "Quick!" said {M}. "You must come {t3}!"',
        ),
        (
            "{N} was sad, but {he} wanted to help, and so {he} went along.",
            '"What has happened?" asked {N}, but {M} did not answer.',
        ),
        ("\n",),
        (
            '"Surprise!" cried many voices. All {his} friends were there {p3}.',
            "And {p3} stood all {his} friends, and they began to sing.",
        ),
        (
            "There was {food} on a long table, and there were {colour} balloons in the trees.",
            "There were lamps in the trees, and there was {food} for everybody.",
        ),
        (
            '{M} gave {him} {a_thing}. "Happy birthday, {N}!"',
            '"This is for you," said {M}, and gave {him} {a_thing}.',
        ),
        (
            '"This is the best day of my life," said {N}.',
            "{N} laughed and cried at the same time.",
        ),
    ),
    (
        ("What did {M} give to {N}?", "{M} gave {N} {a_thing}."),
        ("Where was the party?", "The party was {p3}."),
        ("What did they eat?", "They ate some {food}."),
    ),
)

_SHARE = Plot(
    "Two Friends and One {Obj}",
    (
        (
            "One day {N} and {M} the {fk} were playing {p1}.",
            "{N} and {M} the {fk} went {t1} to play.",
        ),
        (
            "There they found {a_thing}.",
            "Under a bush they saw {a_thing}.",
        ),
        (
            '"It is mine!" said {N}. "I saw it first."',
            '"I want it!" cried {N}.',
        ),
        (
            '"No, it is mine!" said {M}. "I picked it up."',
            '"No, I want it!" cried {M}.',
        ),
        (
            "They pulled and pulled, and both of them grew angry.",
            "They shouted so loudly that the birds flew away.",
        ),
        ("\n",),
        (
            'An old owl sat in a tree. "Why do you fight?" asked the owl.',
            'An old woman came by. "What is all this noise?" she asked.',
        ),
        (
            "They told the whole story, and both of them were ashamed.",
            '"There is only one {obj}, and there are two of us," said {N}.',
        ),
        (
            '"It is easy," was the answer. "{N} can have it today, and {M} can have it tomorrow."',
            '"Then take turns," was the answer. "A friend is worth more than {a_obj}."',
        ),
        ("\n",),
        (
            "{N} looked at {M}, and {M} looked at {N}. Then they both began to laugh.",
            '"I am sorry," said {N}. "I am sorry too," said {M}.',
        ),
        (
            '"You may have it first," said {N}. "No, you first!" said {M}.',
            "So they took turns, and each of them was careful with the {thing}.",
        ),
    ),
    (
        ("What did they find?", "They found {a_thing}."),
        ("Where did they play?", "They played {p1}."),
        ("Who played with {N}?", "{M} the {fk} played with {N}."),
    ),
)

_RESCUE = Plot(
    "{N} to the Rescue",
    (
        (
            "One {season} morning, {N} was walking {t1}.",
            "One day {N} took {his} {thing} and went {t1}.",
        ),
        (
            'Suddenly {he} heard a cry. "Help! Help!"',
            "Then somebody called for help.",
        ),
        (
            "{M} the {fk} had fallen into a deep hole and could not get out.",
            "It was {M} the {fk}, who was stuck in the mud.",
        ),
        ("\n",),
        (
            "{N} pulled as hard as {he} could, but it was no use.",
            "{N} held out a hand, but {he} was not strong enough.",
        ),
        (
            '"Wait here," said {N}. "I have an idea."',
            '"Do not be afraid," said {N}. "I will be back soon."',
        ),
        (
            "{He} ran {t2} and came back with a long rope.",
            "{He} ran as fast as {he} could {t2} and found a rope.",
        ),
        ("\n",),
        (
            "{N} tied one end to a tree and threw the other end to {M}.",
            '"Take the rope!" cried {N}, and {M} held on to it.',
        ),
        (
            '"One, two, three, pull!" And out came {M}, dirty but happy.',
            "They pulled and pulled, and at last {M} was free.",
        ),
        ("\n",),
        (
            '"You have saved me," said {M}. "How can I thank you?"',
            '"Thank you!" said {M}. "What can I do for you?"',
        ),
        (
            '"Be my friend," said {N}. "That is enough."',
            '"You would do the same for me," said {N}.',
        ),
        (
            "Then they went home and ate some {food}.",
            "So they went to the house of {M} and ate a big plate of {food}.",
        ),
    ),
    (
        ("Who needed help?", "{M} the {fk} needed help."),
        ("What did {N} find?", "{N} found a rope."),
        ("What did they eat?", "They ate some {food}."),
    ),
)

PLOTS: tuple[Plot, ...] = (
    _LOST,
    _BAKING,
    _JOURNEY,
    _STORM,
    _RACE,
    _SEED,
    _TRADE,
    _SOUND,
    _LEARN,
    _PARTY,
    _SHARE,
    _RESCUE,
)

OPENINGS: Slot = (
    "Once upon a time, there was {a_tk} named {N}. {He} lived {home}.",
    "Once upon a time, {a_tk} called {N} lived {home}.",
    "Once upon a time there lived {a_tk}. {His} name was {N}, and {he} lived {home}.",
    "Once upon a time, {home}, there lived {a_tk} named {N}.",
    "There was once {a_tk} named {N}, who lived {home}.",
    "Long ago, {a_tk} named {N} lived {home}.",
    "A long time ago, there was {a_tk} whose name was {N}. {He} lived {home}.",
    "{N} was {a_tk}. {He} lived {home}.",
    "{N} the {k} lived {home}. {He} was very {trait}.",
    "The {k} was called {N}, and {he} lived {home}. Everybody said that {he} was {trait}.",
    "The {trait} {k} lived {home}. {His} name was {N}.",
    "One {season} morning, {a_tk} named {N} woke up {home}.",
    "This is the story of {N}, {a_tk} who lived {home}.",
    "Far away, {home}, lived {a_tk} named {N}.",
    "In a land far away, there was {a_tk} named {N}. {He} lived {home}.",
    "It was a {weather} day in {season}. {N}, {a_tk}, was at home {home}.",
)
FRIENDS: Slot = (
    "",
    "",
    "{His} best friend was {M}, {a_ftk}.",
    "Next door lived {M}, {a_ftk}.",
    "{N} had one good friend, {a_fk} named {M}.",
)
BRIDGES: Slot = (
    "A few days later, something else happened.",
    "But that is not the end of the story.",
    "The next week, the two friends met again.",
)
ENDINGS: Slot = (
    "And they lived happily ever after.",
    "From that day on, {N} and {M} were the best of friends.",
    "{N} went home and slept very well that night.",
    "And if you go {t1} today, you may still see {N} and {M} there.",
    "That night, {N} fell asleep with a smile.",
    "And so it was a good day after all. The end.",
    "The end.",
    "{N} never forgot that day.",
)

SCENES: tuple[Slot, ...] = (
    (
        "The {k} sat {p1}.",
        "The {k} was sleeping {p1}.",
        "The {trait} {k} walked slowly {t1}.",
        "The {k} and the {fk} met {p1}.",
        "There was {a_tk} {p1}.",
        "Every morning, the {k} went {t1}.",
    ),
    (
        "It was a {weather} day, and the air smelled of {season}.",
        "The sky was grey, and it was going to rain.",
        "It was a {weather} morning, and nobody else was there.",
        "The sun was low, and the shadows were long.",
    ),
    (
        "{He} had found {a_thing} and did not know what it was for.",
        "{He} was waiting for {his} friend, the {fk}.",
        "{He} was thinking about some {food}.",
        "In the grass lay {a_thing}, and the {k} looked at it for a long time.",
    ),
    (
        'After a while the {fk} came and said, "What a {weather} day!"',
        'Then the {fk} came along. "May I sit with you?" asked the {fk}.',
        "Somebody was coming. It was the {fk} with some {food}.",
    ),
    (
        '"Good morning," said the {k}. "Would you like to see my {thing}?"',
        '"It is good that you came," said the {k}. "I was a little lonely."',
        "The {k} was glad and made room for {his} friend.",
    ),
    (
        "They sat together until it was dark.",
        "They talked about the {season} and laughed a lot.",
        "Then they went {t2} to look at the moon.",
        "And that was all they did, and it was enough.",
    ),
)
LETTER: tuple[Slot, ...] = (
    ("Dear {M},\n\n",),
    (
        "I am writing to you from my house. It is {season} here, and the weather is {weather}.",
        "How are you? I hope that you are well. Here it is {weather} and quiet.",
    ),
    (
        "Yesterday I went {t1} and saw {a_fk}.",
        "Last week I found {a_thing} {p1}.",
        "On {day} I made some {food}, and I thought of you.",
    ),
    (
        "Do you remember the day when we played {p2}?",
        "I still have the {thing} that you gave me.",
        "I have learned how to {skill}. You must see it!",
    ),
    (
        "Please come and visit me soon.",
        "Please write to me when you have time.",
        "I hope that you will come in the {season}.",
    ),
    ("\n\nYour friend,\n{N}",),
)
SKILLS: Slot = (
    "swim",
    "sing",
    "dance",
    "read",
    "whistle",
    "ride a horse",
    "climb a tree",
    "tell stories",
    "count to one hundred",
    "make a fire",
    "play the flute",
    "paint pictures",
    "juggle",
    "skate on the ice",
)
WEATHERS: Slot = ("sunny", "rainy", "windy", "cold", "warm", "foggy", "bright", "quiet")
