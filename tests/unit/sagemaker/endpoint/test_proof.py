import pytest

from hyperpod_ft.errors import UserError
from hyperpod_ft.runs.results.samples import RecordedAnswers
from hyperpod_ft.sagemaker.endpoint.proof import ComparedAnswer, Proof, completion_request, completion_text

RECORDED = RecordedAnswers("p", False, "It is a base.", "It is tuned well.")


def asked(*answers: str, recorded: RecordedAnswers = RECORDED) -> Proof:
    return Proof(tuple(ComparedAnswer(recorded, answer) for answer in answers))


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
    prefix = RecordedAnswers("p", False, "yes", "yes and no")
    assert asked("yes and no", recorded=prefix).like_tuned == 1
    assert asked("yes", recorded=prefix).like_tuned == 0


def test_where_both_models_agree_answers_must_be_equal() -> None:
    same = RecordedAnswers("p", False, "yes", "yes")
    assert asked("yes", recorded=same).holds
    assert not asked("no", recorded=same).holds


def test_prompts_are_asked_as_stage_generate_did() -> None:
    assert completion_request(RECORDED, "tuned", 12) == {
        "model": "tuned",
        "prompt": "p",
        "max_tokens": 12,
        "temperature": 0,
        "repetition_penalty": 1.0,
        "add_special_tokens": True,
    }
    templated = completion_request(RecordedAnswers("<s>p", True, "", ""), None, 12)
    assert templated["add_special_tokens"] is False
    assert "model" not in templated


def test_an_answer_that_is_no_completion_is_refused() -> None:
    with pytest.raises(UserError, match="not a completion"):
        completion_text({"generated_text": "x"})
