"""Shipped environments: held-out problems are trained in no form, the right answer is worth 1, demonstrations fit."""

import contextlib
import json
import re
import subprocess
import sys
import threading
from itertools import combinations_with_replacement
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.closed import ConfigError
from conf.environments import (
    ArithmeticConfig,
    CalculatorConfig,
    LargestDigitConfig,
    MathConfig,
    ReasoningGymConfig,
    RowsConfig,
)
from datum.errors import DataError
from recipes.environments import arithmetic, calculator, formats, largest_digit, math, pairs, rows
from recipes.environments.environment import Environment, parse_rewards
from recipes.environments.rewards import RewardRunner
from recipes.runtime.build import locate

ROOT = Path(__file__).parents[3]
PROBLEMS = ROOT / "recipes" / "demo" / "math.jsonl"
REWARDS = {"correct": {"function": "recipes.environments.largest_digit.correct"}}
GENERATED = {
    "largest_digit": LargestDigitConfig,
    "arithmetic": ArithmeticConfig,
    "calculator": CalculatorConfig,
    "reasoning_gym": ReasoningGymConfig,
}


def built(name, seed=0, **options):
    reward = "score" if name == "reasoning_gym" else "correct"
    if name == "reasoning_gym":
        options = {"task": "chain_sum"} | options
    rewards = {reward: {"function": f"recipes.environments.{name}.{reward}"}}
    config = GENERATED[name](**{"rewards": rewards} | options)
    return locate(config._target_)(config, seed)


def numbers(problem):
    return tuple(sorted(re.findall(r"\d+", problem.messages[-1]["content"])))


def judged(environment, problems, completions):
    function = locate(next(iter(environment.rewards.values())).function)
    return function(completions, [problem.row for problem in problems])


@pytest.mark.parametrize("name", GENERATED)
def test_a_seed_gives_the_same_problems_and_another_the_same_held_out_ones(name):
    one, again, other = (built(name, seed, train_size=50, eval_size=9) for seed in (0, 0, 1))
    assert (one.train, one.heldout) == (again.train, again.heldout)
    assert one.train != other.train
    assert one.heldout == other.heldout
    assert (len(one.train), len(one.heldout)) == (50, 9)
    assert len({problem.id for problem in one.train}) == 50


@pytest.mark.parametrize("name", GENERATED)
@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_held_out_is_not_trained(name, seed):
    environment = built(name, seed)
    held_out = {problem.messages[-1]["content"] for problem in environment.heldout}
    assert len(held_out) == len(environment.heldout) >= 40
    assert not held_out & {problem.messages[-1]["content"] for problem in environment.train}
    assert environment.max_turns == (2 if name == "calculator" else 1)


def test_no_order_of_a_held_out_combination_is_trained():
    environment = built("largest_digit")
    assert not set(map(numbers, environment.heldout)) & set(map(numbers, environment.train))
    assert len(environment.train) + sum(len(set(permuted(p))) for p in environment.heldout) == 1000


def permuted(problem):
    from itertools import permutations

    return permutations(problem.row["digits"])


@pytest.mark.parametrize("operations", [["+"], ["+", "-", "*"]])
def test_no_order_and_operation_of_a_held_out_pair_is_trained(operations):
    environment = built("arithmetic", operations=operations, max_operand=12)
    assert not set(map(numbers, environment.heldout)) & set(map(numbers, environment.train))
    assert {problem.row["operation"] for problem in environment.train} == set(operations)
    assert all(int(p.row["answer"]) >= 0 for p in [*environment.train, *environment.heldout])


def test_a_held_out_pair_is_multiplied_in_neither_order():
    environment = built("calculator", max_operand=30)
    first_two = [
        {tuple(sorted(re.findall(r"\d+", p.id)[:2])) for p in part} for part in (environment.train, environment.heldout)
    ]
    assert not first_two[0] & first_two[1]


@given(low=st.integers(0, 5), span=st.integers(0, 12), data=st.data())
def test_pairs_are_each_drawn_once(low, span, data):
    every = set(combinations_with_replacement(range(low, low + span + 1), 2))
    heldout = data.draw(st.integers(0, len(every) - 1))
    train, held = pairs.split_pairs(low, low + span, len(every), heldout, data.draw(st.integers(0, 9)))
    assert len(train) + len(held) == len(every)
    assert {*train, *held} == every


def test_large_operands_are_not_listed():
    environment = built("arithmetic", max_operand=10**9, train_size=100, operations=["+", "*"])
    assert len(environment.train) == 100
    assert len(environment.heldout) == 128


@pytest.mark.parametrize("name", ["largest_digit", "arithmetic", "calculator"])
def test_the_right_answer_is_worth_1_and_nothing_else(name):
    environment = built(name)
    problems = [*environment.train[:50], *environment.heldout[:20]]
    answers = [problem.row["answer"] for problem in problems]
    for problem, answer in zip(problems, answers, strict=True):
        terms = problem.messages[-1]["content"].removeprefix("What is ").rstrip("?")
        assert int(answer) == (max(problem.row["digits"]) if name == "largest_digit" else eval(terms))
    assert judged(environment, problems, [f" {answer}\n" for answer in answers]) == [1.0] * 70
    for wrong in ("{}0", "", "{} {}", "-{}", "the answer is {}"):
        assert judged(environment, problems, [wrong.format(a, a) for a in answers]) == [0.0] * 70


@pytest.mark.parametrize("name", ["largest_digit", "arithmetic", "calculator"])
def test_demonstrations_teach_the_form_and_not_the_answer(name):
    module = {"largest_digit": largest_digit, "arithmetic": arithmetic, "calculator": calculator}[name]
    shown = module.warm_up_rows(3)
    assert shown == module.warm_up_rows(3) != module.warm_up_rows(4)
    environment = built(name, 3)
    assert [row["messages"][0] for row in shown] == [problem.messages[-1] for problem in environment.train]
    last = [row["messages"][-1] for row in shown]
    assert {message["role"] for message in last} == {"assistant"}
    assert all(re.fullmatch(r"\d+", message["content"]) for message in last)
    right = judged(environment, environment.train, [message["content"] for message in last])
    assert 0.3 < sum(right) / len(right) < 0.62


def test_largest_digit_demonstrations_name_any_of_the_digits():
    digits = [(row["messages"][1]["content"], numbers_in(row)) for row in largest_digit.warm_up_rows(0)]
    assert all(answer in listed for answer, listed in digits)
    places = [listed.index(answer) for answer, listed in digits if len(set(listed)) == 3]
    assert all(abs(places.count(place) / len(places) - 1 / 3) < 0.08 for place in range(3))


def numbers_in(row):
    return re.findall(r"\d", row["messages"][0]["content"])


def test_the_demo_prompt_is_short_and_its_digits_are_tokens():
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(ROOT / "recipes" / "demo" / "tokenizer" / "tokenizer.json"))
    tokens = tokenizer.encode(built("largest_digit").train[0].messages[0]["content"]).tokens
    assert len(tokens) <= 21
    assert sum(token.isdigit() for token in tokens) == 3


def test_a_system_prompt_comes_first():
    for name in GENERATED:
        problem = built(name, system_prompt="Be brief.", eval_size=2, train_size=2).train[0]
        assert problem.messages[0] == {"role": "system", "content": "Be brief."}
        assert [message["role"] for message in problem.messages] == ["system", "user"]


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("largest_digit", {"eval_size": 220}, "environment.eval_size=220: there are 220 combinations of 3 digits"),
        ("largest_digit", {"train_size": 1001}, "environment.train_size=1001: there are 818 "),
        ("largest_digit", {"digits": 9}, "environment.digits=9: accepted are whole numbers from 2 to 5"),
        ("arithmetic", {"max_operand": 3, "eval_size": 10}, "there are 10 pairs of numbers from 0 to 3"),
        ("arithmetic", {"max_operand": 3, "train_size": 99}, "environment.train_size=99: there are 14 problems"),
        ("arithmetic", {"operations": ["/"]}, "environment.operations=['/']: accepted is a list of different ones"),
        ("calculator", {"max_turns": 1}, "environment.max_turns=1: accepted are whole numbers from 2"),
        ("calculator", {"max_operand": 4, "eval_size": 6}, "there are 6 pairs of numbers from 2 to 4"),
        ("reasoning_gym", {"task": "chain_sums"}, "environment.task=chain_sums: .* did you mean chain_sum?"),
        ("reasoning_gym", {"task": "zzzz"}, "there is no such task in reasoning-gym; it has ab, acre, "),
        (
            "reasoning_gym",
            {"options": {"terms": 2}},
            "environment.options={'terms': 2} of the task chain_sum: .*'terms'",
        ),
        ("reasoning_gym", {"options": {"min_terms": 0}}, "of the task chain_sum: min_terms must be positive"),
        (
            "reasoning_gym",
            {"task": "coin_flip", "options": {"min_trials": 3, "max_trials": 3}},
            "environment.eval_size=64",
        ),
    ],
)
def test_options_that_cannot_be_had(name, options, text):
    pattern = text if ".*" in text else re.escape(text)
    with pytest.raises(ConfigError, match=pattern):
        built(name, **options)


def test_some_reward_has_a_weight():
    assert parse_rewards({"a": {"function": "f.g"}, "b": {"function": "f.h", "weight": 0}})["a"].weight == 1.0
    with pytest.raises(ConfigError, match="every weight is 0, so there is nothing to train on"):
        parse_rewards({"a": {"function": "f.g", "weight": 0}})


def test_an_environment_without_demonstrations_says_so():
    with pytest.raises(ConfigError, match="environment=mine has no demonstrations"):
        Environment("mine", [], [], {}).warm_up_rows(0)


# ---------------------------------------------------------------------------------------------------------- calculator


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12*7", "84"),
        ("12 * (7 + 5) - -1", "145"),
        ("1/4", "0.25"),
        ("6/3", "2"),
        ("7 // 2 + 7 % 2", "4"),
        ("2**10", "1024"),
        ("1e3", "1000"),
        (" 2 + 2 ", "4"),
    ],
)
def test_the_calculator_calculates(expression, value):
    assert calculator.calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("1/0", "division by zero"),
        ("9**9**9", "an exponent is above 64"),
        ("(10**18)*10", "a number is too large"),
        ("1e300*1e300", "a number is too large"),
        ("10.0**64**1", "a number is too large"),
        ("(-1)**0.5", "the result is not real"),
        ("2+", "cannot be read"),
        ("(" * 150 + "1" + ")" * 49, "cannot be read"),
        ("1+" * 100 + "1", "longer than 200 characters"),
        ("__import__('os').system('x')", "only numbers"),
        ("[1][0]", "only numbers"),
        ("True", "only numbers"),
        ("'a'*9", "only numbers"),
        ("x", "only numbers"),
        ("12and 3", "only numbers"),  # Python itself would warn
        ("1(2)", "only numbers"),
        ("1 if 1 else 2", "only numbers"),
        ("", "cannot be read"),
    ],
)
def test_the_calculator_runs_nothing_else(expression, text):
    with pytest.raises(ValueError, match=text):
        calculator.calculate(expression)


@given(st.text(alphabet="0123456789+-*/%().e ", max_size=60))
@settings(max_examples=200)
def test_the_calculator_gives_a_number_or_a_value_error(expression):
    with contextlib.suppress(ValueError):
        assert abs(float(calculator.calculate(expression))) <= 10**18


def test_a_call_is_answered_and_an_answer_ends_the_rollout():
    environment = built("calculator")
    problem = environment.train[0]
    call = f"<tool_call>{problem.row['expression']}</tool_call>"
    assert environment.reply(problem, [call]) == [{"role": "tool", "content": problem.row["answer"]}]
    in_json = {"name": "calculator", "arguments": {"expression": problem.row["expression"]}}
    as_json = f"Let me see.\n<tool_call>\n{json.dumps(in_json)}\n</tool_call>"
    assert environment.reply(problem, ["earlier", as_json]) == [{"role": "tool", "content": problem.row["answer"]}]
    assert environment.reply(problem, [call, "12"]) is None
    assert judged(environment, [problem] * 2, [call, problem.row["answer"]]) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("call", "reply"),
    [
        ("1/0", "error: division by zero"),
        ('{"name": "search", "arguments": {"expression": "1"}}', "error: there is no tool search, only calculator"),
        ('{"name": "calculator"}', 'error: a call is {"name": "calculator", "arguments": {"expression": "1 + 2"}}'),
        ("{", 'error: a call is {"name": "calculator", "arguments": {"expression": "1 + 2"}}'),
    ],
)
def test_a_wrong_call_is_told_what_is_wrong(call, reply):
    environment = built("calculator")
    assert environment.reply(environment.train[0], [f"<tool_call>{call}</tool_call>"]) == [
        {"role": "tool", "content": reply}
    ]


def test_demonstrated_calls_are_what_the_environment_would_reply():
    environment = built("calculator", 5)
    called = 0
    for problem, row in zip(environment.train[:200], calculator.warm_up_rows(5)[:200], strict=True):
        _, *turns = row["messages"]
        if len(turns) == 3:
            called += 1
            assert environment.reply(problem, [turns[0]["content"]]) == [turns[1]]
    assert 60 < called < 140


# ------------------------------------------------------------------------------------------------------ forms, outside


@pytest.mark.parametrize(
    ("completion", "is_tagged", "answer"),
    [
        ("<answer>4</answer>", 1.0, "4"),
        ("So it is\n<answer>\n4\n</answer>\n", 1.0, "4"),
        ("4", 0.0, "4"),
        ("<answer>4</answer> or so", 0.0, "4"),
        ("<answer>3</answer><answer>4</answer>", 0.0, "4"),
        ("<answer><answer>4</answer>", 0.0, "4"),
        ("<answer>4", 0.0, "<answer>4"),
        ("", 0.0, ""),
    ],
)
def test_answer_tags(completion, is_tagged, answer):
    assert formats.answer_tags([completion], [{}]) == [is_tagged]
    assert formats.matches([completion], [{}]) == [is_tagged]
    assert formats.answer_of(completion) == answer


def test_a_pattern_in_the_row_must_match_all_of_the_completion():
    row = {"pattern": r"\d+ apples"}
    assert formats.matches(["12 apples", "12 apples!", "no"], [row] * 3) == [1.0, 0.0, 0.0]


def test_reasoning_gym_scores_by_the_task_and_its_options():
    environment = built("reasoning_gym", train_size=5, eval_size=5, options={"min_terms": 2, "max_terms": 2})
    answers = [problem.row["answer"] for problem in environment.train]
    assert judged(environment, environment.train, [f"<answer>{answer}</answer>" for answer in answers]) == [1.0] * 5
    assert judged(environment, environment.train, ["none"] * 5) < [1.0] * 5
    made = RewardRunner(environment.rewards, timeout_s=10)
    made.check([problem.row for problem in environment.train])
    assert made.score(answers, [problem.row for problem in environment.train]).total == [1.0] * 5
    made.close()


def math_config(**options):
    rewards = {"correct": {"function": "recipes.environments.math.correct"}}
    return MathConfig(**{"rewards": rewards, "path": str(PROBLEMS)} | options)


def test_every_shipped_problem_accepts_its_own_answer_in_the_worker():
    environment = math.build(math_config(eval_fraction=0.2), 0)
    problems = [*environment.train, *environment.heldout]
    assert len(problems) == len(PROBLEMS.read_text().splitlines()) >= 20
    assert len(environment.heldout) == 4
    made = RewardRunner(environment.rewards, timeout_s=10)
    found = [p.row for p in problems]
    assert made.score([row["solution"] for row in found], found).total == [1.0] * len(found)
    assert made.score([f"That makes \\boxed{{{row['answer']}}}." for row in found], found).total == [1.0] * len(found)
    assert made.score(["I do not know, 123456"] * len(found), found).total == [0.0] * len(found)
    made.close()


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        ("1/2", "0.5", 1.0),
        ("0.5", r"$\frac{1}{2}$", 1.0),
        ("3,000", "so 3000 in all", 1.0),
        ("x^2+1", "<answer>1+x^2</answer>", 1.0),
        ("x^2+1", "1+x^2", 1.0),
        ("12", "<answer>12.0</answer> not 13", 1.0),
        ("12", "13", 0.0),
        ("2", "1/2", 0.0),
        ("2", "", 0.0),
    ],
)
def test_math_answers_are_compared_by_value_in_any_thread(answer, completion, reward):
    found = []
    thread = threading.Thread(target=lambda: found.extend(math.correct([completion], [{"answer": answer}])))
    thread.start()
    thread.join()
    assert found == [reward]


def test_an_expected_answer_that_cannot_be_read_is_an_error_not_a_zero():
    with pytest.raises(ValueError, match="the answer '' of the row is nothing"):
        math.correct(["1"], [{"answer": ""}])


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(math, "math_verify", None)
    with pytest.raises(ConfigError, match=re.escape("needs math-verify: pip install 'math-verify[antlr4_9_3]'")):
        math.build(math_config(), 0)
    monkeypatch.setattr("recipes.environments.reasoning_gym.reasoning_gym", None)
    with pytest.raises(ConfigError, match="needs reasoning-gym: pip install reasoning-gym"):
        built("reasoning_gym")


# --------------------------------------------------------------------------------------------------------------- files


def rows_config(path, **options):
    return RowsConfig(**{"rewards": REWARDS, "path": str(path)} | options)


def written(tmp_path, *records, name="problems.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_rows_become_problems_and_rewards_read_all_their_columns(tmp_path):
    chat_row = {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi?"}], "n": 3}
    path = written(tmp_path, {"prompt": "2 + 2?", "answer": "4"}, chat_row)
    environment = rows.build(rows_config(path), 0)
    assert [problem.id for problem in environment.train] == [f"{path}:1", f"{path}:2"]
    assert environment.train[0].messages == ({"role": "user", "content": "2 + 2?"},)
    assert environment.train[1].messages == tuple(chat_row["messages"])
    assert environment.train[1].row == chat_row
    assert environment.heldout == []


def test_rows_are_held_out_by_file_or_share(tmp_path):
    path = written(tmp_path, *({"prompt": f"{n}?"} for n in range(20)))
    other = written(tmp_path, {"prompt": "new?"}, name="other.jsonl")
    assert len(rows.build(rows_config(path, eval_path=str(other)), 0).heldout) == 1
    one, two = (rows.build(rows_config(path, eval_fraction=0.25, train_size=9), seed) for seed in (0, 1))
    assert (len(one.train), len(one.heldout)) == (9, 5)
    assert one.heldout == two.heldout


def test_parquet_rows(tmp_path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "problems.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a?", "b?"], "answer": ["1", "2"]}), path)
    assert [problem.row["answer"] for problem in rows.build(rows_config(path), 0).train] == ["1", "2"]


@pytest.mark.parametrize(
    ("records", "text"),
    [
        ([], "{path}: no records; at least one is needed"),
        ([{"prompt": "a?"}, {"prompt": "a?"}], "{path}:2: the prompt is that of {path}:1; every prompt is asked once"),
        ([{"answer": "4"}], "{path}:1: a problem has either prompt or messages, this one has the keys answer"),
        ([{"prompt": "a", "messages": []}], "{path}:1: a problem has either prompt or messages"),
        ([{"prompt": " "}], "{path}:1: prompt is ' '; accepted is a text that is not empty"),
        ([{"messages": [{"role": "user"}]}], "{path}:1: messages is [{{'role': 'user'}}]; accepted is a list"),
        ([{"messages": []}], "{path}:1: messages is []; accepted is a list of at least one"),
        (
            [{"messages": [{"role": "assistant", "content": "x"}]}],
            "{path}:1: the messages end with the assistant's turn",
        ),
        ([7], "{path}:1: a record must be a JSON object, got int"),
    ],
)
def test_wrong_rows_are_named_by_file_and_line(tmp_path, records, text):
    path = written(tmp_path, *records)
    with pytest.raises(DataError, match=re.escape(text.format(path=path))):
        rows.build(rows_config(path), 0)


def test_a_prompt_is_not_both_trained_and_held_out(tmp_path):
    path, other = written(tmp_path, {"prompt": "a?"}), written(tmp_path, {"prompt": "a?"}, name="eval.jsonl")
    with pytest.raises(DataError, match=r"eval.jsonl:1: the prompt is that of .*problems.jsonl:1"):
        rows.build(rows_config(path, eval_path=str(other)), 0)


def test_file_options_that_contradict_each_other(tmp_path):
    path = written(tmp_path, {"prompt": "a?"})
    with pytest.raises(ConfigError, match=r"eval_path and environment.eval_fraction are both set"):
        rows_config(path, eval_path="x", eval_fraction=0.5)
    with pytest.raises(ConfigError, match="eval_size=3: there are no held-out problems"):
        rows_config(path, eval_size=3)
    with pytest.raises(ConfigError, match=r"environment.train_size=2: there are 1 problems"):
        rows.build(rows_config(path, train_size=2), 0)
    with pytest.raises(ConfigError, match="has weight 2; files of problems have none"):
        rows.build(RowsConfig(rewards=REWARDS, path=[{"path": str(path), "weight": 2}]), 0)
    with pytest.raises(DataError, match=r"problems.jsonl: environment.eval_fraction=0.5 of 1 distinct rows leaves"):
        rows.build(rows_config(path, eval_fraction=0.5), 0)


def test_two_system_prompts_are_refused(tmp_path):
    path = written(tmp_path, {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]})
    with pytest.raises(DataError, match=r":1: the messages begin with a system prompt of their own; leave out"):
        rows.build(rows_config(path, system_prompt="c"), 0)


def test_math_rows_without_question_or_answer(tmp_path):
    path = written(tmp_path, {"question": "1 + 1?", "solution": "2"})
    text = "answer is None; accepted is a text that is not empty. The row has the keys question, solution; environment."
    with pytest.raises(DataError, match=re.escape(f"{path}:1: {text}answer_key names the column")):
        math.build(math_config(path=str(path)), 0)
    (problem,) = math.build(math_config(path=str(path), answer_key="solution"), 0).train
    assert problem.row["answer"] == "2"


# ------------------------------------------------------------------------------------------------- documented examples


def documented(number):
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "environments.md").read_text(), re.DOTALL)[number]


def test_the_rewards_of_the_documentation_work_as_they_stand(tmp_path, monkeypatch):
    (tmp_path / "documented_rewards.py").write_text(documented(0))
    monkeypatch.syspath_prepend(str(tmp_path))
    rewards = {name: {"function": f"documented_rewards.{name}"} for name in ("length", "full_stop")}
    path = written(tmp_path, {"prompt": "Write a sentence of two words.", "words": 2})
    environment = rows.build(RowsConfig(rewards=rewards, path=str(path)), 0)
    made = RewardRunner(environment.rewards, timeout_s=10, allow_targets=["documented_rewards"])
    found = [problem.row for problem in environment.train]
    made.check(found)
    assert made.score(["So be", "It is."], found * 2).total == [1.0, 2.0]
    assert made.score([""], found).total == [1 / 3]
    made.close()


def test_the_environment_of_the_documentation_works_as_it_stands():
    names = {}
    exec(documented(1), names)
    environment = names["build"](LargestDigitConfig(rewards=REWARDS), 0)
    problem = environment.train[0]
    number = problem.row["number"]
    assert environment.reply(problem, ["0"]) == [{"role": "user", "content": "higher"}]
    assert environment.reply(problem, ["0", str(number)]) is None
    assert names["found"]([str(number), "0"], [problem.row] * 2) == [1.0, 0.0]


# ------------------------------------------------------------------------------------------------------------- imports


def test_environments_import_no_torch():
    files = (ROOT / "recipes" / "environments").glob("*.py")
    code = "; ".join(["import sys", *(f"import recipes.environments.{file.stem}" for file in files)])
    code += "; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=ROOT).returncode == 0


@pytest.mark.parametrize("size", [None, 10, 100])
def test_every_largest_digit_stays_among_the_answers_that_are_trained(size):
    rewards = {"correct": {"function": "recipes.environments.largest_digit.correct"}}
    environment = largest_digit.build(LargestDigitConfig(eval_size=size, rewards=rewards), 0)
    assert {problem.row["answer"] for problem in environment.train} == set("0123456789")
