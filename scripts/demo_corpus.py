"""What the demo checkpoint reads: short English written from templates, chats, and additions; and its
tokenizer, one token a character.

Everything is drawn from a `random.Random`, so a seed fixes the corpus. Additions that
`minimax_hybrid.rl.tasks` holds out for measuring appear in none of it.
"""

import random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from minimax_hybrid.rl.tasks import Problem, addition, draw

SPECIAL = {
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "bos_token": "<beginning_of_sentence>",
    "eos_token": "<end_of_sentence>",
}
CHARACTERS = "\t\n" + "".join(map(chr, range(32, 127)))
# The roles of the release's template; content may be a string or a list of parts.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- set content = message['content'] -%}
{%- set text = content if content is string else content | map(attribute='text') | join -%}
{{- bos_token + ('ai' if message['role'] == 'assistant' else message['role']) + '\\n' + text -}}
{{- eos_token + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- bos_token + 'ai\\n' -}}{%- endif -%}"""

NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
).split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
NAMES = "Ada Ben Cleo Dan Emmy Finn Gauss Hana Ida Jo Kurt Lena Max Nora Otto Paul".split()
THINGS = "apples books stones coins nuts shells pencils stamps leaves keys cups buttons".split()
PLACES = "by the river|in the garden|under the old tree|at the market|on the hill|near the pond".split("|")
WEATHER = "sunny rainy cold windy warm quiet".split()
# animal: what it is, where it lives, what it eats, what it likes to do, legs
ANIMALS = {
    "fox": ("a clever red animal", "in the forest", "mice and berries", "run at night", 4),
    "owl": ("a quiet brown bird", "in an old tree", "mice", "sit in the dark and listen", 2),
    "bear": ("a big brown animal", "in the mountains", "fish and honey", "sleep all winter", 4),
    "frog": ("a small green animal", "near the pond", "flies", "sing in the rain", 4),
    "spider": ("a small grey animal", "in the corner of the house", "flies", "sit in its web", 8),
    "bee": ("a small yellow insect", "in a hive", "honey", "fly from flower to flower", 6),
    "ant": ("a tiny black insect", "under the ground", "seeds", "carry heavy things", 6),
    "horse": ("a strong brown animal", "on the farm", "grass and apples", "run in the morning", 4),
    "duck": ("a white bird", "on the lake", "water plants", "swim in a row", 2),
    "cat": ("a soft grey animal", "in the house", "fish", "sleep in the sun", 4),
    "wolf": ("a grey animal", "in the forest", "meat", "sing to the moon", 4),
    "snail": ("a slow animal with a shell", "in the garden", "leaves", "go out in the rain", 0),
}


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each printable ASCII character, tab and newline; anything else is `<unk>`."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL.values(), *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **SPECIAL,
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def training_addition(rng: random.Random, digits: int) -> Problem:
    """An addition that is not held out."""
    return draw(addition, rng, difficulty=digits, count=1)[0]


def worked(problem: Problem) -> str:
    """`12+34=` -> `[64]46`: the digits from the ones up, as carries arise, then the answer.

    Without the working a model of this size stays at guessing all but the leading digit for long.
    """
    return f"[{problem.answer[::-1]}]{problem.answer}"


def document(rng: random.Random) -> str:
    """A few sentences that belong together."""
    writers = {about_animal: 6, story: 6, counting: 2, sums: 2, week: 3, copying: 1, about_model: 1}
    return rng.choices(list(writers), list(writers.values()))[0](rng)


def chat(rng: random.Random) -> list[dict[str, str]]:
    """A question and its answer, as messages."""
    animal = rng.choice(list(ANIMALS))
    _, home, food, _, legs = ANIMALS[animal]
    one = _a(animal).capitalize()
    problem = training_addition(rng, rng.randint(1, 2))
    question, answer = rng.choice(
        (
            (f"What is {problem.prompt[:-1]}?", f"{problem.prompt}{worked(problem)}"),
            (f"Tell me about the {animal}.", about_animal(rng, animal)),
            (f"Where does {_a(animal)} live?", f"{one} lives {home}."),
            (f"What does {_a(animal)} eat?", f"{one} eats {food}."),
            (f"How many legs does {_a(animal)} have?", f"{one} has {NUMBERS[legs] if legs else 'no'} legs."),
            ("Tell me a story.", story(rng)),
            ("Who are you?", about_model(rng)),
            (rng.choice(("Hello", "Hi", "Hello!", "Hi!")), f"Hello! {about_model(rng)}"),
        )
    )
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def about_animal(rng: random.Random, animal: str | None = None) -> str:
    animal = animal or rng.choice(list(ANIMALS))
    what, home, food, habit, legs = ANIMALS[animal]
    facts = [
        f"It lives {home}.",
        f"It eats {food}.",
        f"It likes to {habit}.",
        f"It has {NUMBERS[legs]} legs." if legs else "It has no legs.",
    ]
    return " ".join([f"The {animal} is {what}.", *rng.sample(facts, 2)])


def story(rng: random.Random) -> str:
    first, second = rng.sample(list(ANIMALS), 2)
    _, _, food, habit, _ = ANIMALS[first]
    has, gets = rng.randint(1, 9), rng.randint(1, 9)
    things, place = rng.choice(THINGS), rng.choice(PLACES)
    opening = rng.choice(
        (
            f"Once upon a time there was {_a(first)} who liked to {habit}.",
            f"One {rng.choice(WEATHER)} day {_a(first)} met {_a(second)} {place}.",
            f"On {rng.choice(DAYS)} the {first} went out to look for {food}.",
        )
    )
    ending = rng.choice(
        (
            f"The {first} had {NUMBERS[has]} {things if has > 1 else things[:-1]}, and the {second} gave it "
            f"{NUMBERS[gets]} more. Now the {first} has {NUMBERS[has + gets]}.",
            f'"Let us go home," said the {second}, and they went home together.',
            f"The {second} said: it is a {rng.choice(WEATHER)} day, and I like to {ANIMALS[second][3]}.",
        )
    )
    return f"{opening} {ending}"


def counting(rng: random.Random) -> str:
    n, step = rng.randint(0, 15), rng.randint(1, 2)
    row = ", ".join(NUMBERS[n : n + 5 * step : step])
    parity = "odd" if n % 2 else "even"
    word = NUMBERS[n].capitalize()
    return rng.choice(
        (
            f"Count with me: {row}.",
            f"{word} is an {parity} number. After {NUMBERS[n]} comes {NUMBERS[n + 1]}.",
            f"The number {n} is written {NUMBERS[n]}, and it is {parity}.",
        )
    )


def sums(rng: random.Random) -> str:
    name, things, digits = rng.choice(NAMES), rng.choice(THINGS), rng.randint(1, 2)
    problem = training_addition(rng, digits)
    a, b = problem.prompt[:-1].split("+")
    return rng.choice(
        (
            f"{a} plus {b} is {problem.answer}.",
            f"{name} has {a} {things} and finds {b} more. Now {name} has {problem.answer} {things}.",
            f"{name} writes {problem.prompt}{worked(problem)} on the board.",
        )
    )


def week(rng: random.Random) -> str:
    i = rng.randrange(7)
    today, tomorrow = DAYS[i], DAYS[(i + 1) % 7]
    weather, name, place = rng.choice(WEATHER), rng.choice(NAMES), rng.choice(PLACES)
    return rng.choice(
        (
            f"Today is {today}. Tomorrow is {tomorrow}.",
            f"On {today} it was {weather}, so {name} stayed {place}. The next day was {tomorrow}.",
            f"The week has seven days, and {tomorrow} comes after {today}.",
        )
    )


def copying(rng: random.Random) -> str:
    """The only text with every character in it."""
    word = "".join(rng.choices(CHARACTERS[2:], k=rng.randint(3, 12)))
    return f"Write this twice: {word}\n{word}\n{word}"


def about_model(rng: random.Random) -> str:
    return rng.choice(
        (
            "I am a small hybrid model. I have seven lightning layers and one softmax layer.",
            "I am a small model. I can add numbers and tell short stories about animals.",
        )
    )


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
