import json
from pathlib import Path

import pytest

from hyperpod_ft.errors import UserError
from hyperpod_ft.serving.endpoint.proof import Asked, Proof, Question, completion_request, completion_text, questions

QUESTION = Question("p", False, "It is a base.", "It is tuned well.")


def asked(*answers: str, question: Question = QUESTION) -> Proof:
    return Proof(tuple(Asked(question, answer) for answer in answers))


def test_equal_answers_are_the_proof() -> None:
    proof = asked("It is tuned well.", " It is tuned well.\n")  # servers differ in the space before an answer
    assert (proof.equal, proof.like_tuned, proof.holds) == (2, 2, True)


def test_an_answer_that_leaves_the_recorded_one_late_is_still_the_tuned_models() -> None:
    proof = asked("It is tuned very", "It is tuned")
    assert (proof.equal, proof.like_tuned, proof.holds) == (0, 2, True)


def test_answers_of_the_base_model_are_no_proof() -> None:
    proof = asked("It is a base.", "It is a base, or", "It is tuned well.")
    assert (proof.equal, proof.like_tuned, proof.holds) == (1, 1, False)
    assert not asked("something else").holds


def test_a_longer_answer_is_not_nearer_to_the_shorter_one() -> None:
    """The base model's answer is the beginning of the tuned model's."""
    prefix = Question("p", False, "yes", "yes and no")
    assert asked("yes and no", question=prefix).like_tuned == 1
    assert asked("yes", question=prefix).like_tuned == 0


def test_where_both_models_agree_answers_must_be_equal() -> None:
    same = Question("p", False, "yes", "yes")
    assert asked("yes", question=same).holds
    assert not asked("no", question=same).holds


def test_prompts_are_asked_as_stage_generate_did() -> None:
    assert completion_request(QUESTION, "tuned", 12) == {
        "model": "tuned",
        "prompt": "p",
        "max_tokens": 12,
        "temperature": 0,
        "repetition_penalty": 1.0,
        "add_special_tokens": True,
    }
    templated = completion_request(Question("<s>p", True, "", ""), None, 12)
    assert templated["add_special_tokens"] is False
    assert "model" not in templated


def test_samples_of_earlier_versions_are_read(tmp_path: Path) -> None:
    samples = tmp_path / "samples.json"
    samples.write_text(json.dumps({"prompts": [{"prompt": "p", "base": "b", "tuned": "t"}], "samples": []}))
    assert questions(samples) == [Question("p", False, "b", "t")]
    samples.write_text("{}")
    with pytest.raises(UserError, match=r"samples\.json: is damaged"):
        questions(samples)


def test_an_answer_that_is_no_completion_is_refused() -> None:
    with pytest.raises(UserError, match="not a completion"):
        completion_text({"generated_text": "x"})
