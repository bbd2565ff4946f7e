"""The scripts in examples/ run as they are, and print what they promise."""

import re
import runpy
from math import exp, log
from pathlib import Path

import pytest
import torch
from hf_folders import write_hf_folder, write_reviews

import shoal

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, capsys) -> str:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.filterwarnings("default")
def test_survival_is_learnt(capsys):
    printed = run_example("survival.py", capsys)
    reached = [float(value) for value in re.findall(r"c_index (0\.\d+)", printed)]
    assert len(reached) == 3 and min(reached) > 0.8 and printed.count("1 of 1 reached") == 3


def test_cox_loss_and_c_index_by_hand():
    """Events at 1, 3 and 4, one patient censored at 2: a sum over those still observed at each event."""
    survival = runpy.run_path(str(EXAMPLES / "survival.py"))
    risk = torch.tensor([[0.5], [-1.0], [2.0], [0.0], [9.0]], dtype=torch.float64)
    targets = torch.tensor([[1.0, 1], [2, 0], [3, 1], [4, 1], [9, 1]], dtype=torch.float64)
    weight = torch.tensor([1.0, 1, 1, 1, 0])  # the last one pads the batch
    first, third = log(exp(0.5) + exp(-1) + exp(2) + exp(0)) - 0.5, log(exp(2) + exp(0)) - 2
    found = survival["compute_cox_loss"](risk, targets, weight)
    assert found[:4].tolist() == pytest.approx([first, 0, third, 0]) and float((found * weight).sum()) > 0
    # pairs: the event at 1 before 2, 3, 4; that at 3 before 4; not the censored one
    assert survival["compute_c_index"](risk[:4], targets[:4]) == pytest.approx((1 + 0 + 1 + 1) / 4)
    x, y = survival["make_patients"](60)
    score = x[:, :1].round()  # with ties
    pairs = [(i, j) for i in range(60) for j in range(60) if y[i, 0] < y[j, 0] and y[i, 1] > 0]
    concordant = sum(float(score[i] > score[j]) + 0.5 * float(score[i] == score[j]) for i, j in pairs)
    assert survival["compute_c_index"](score, y) == pytest.approx(concordant / len(pairs))


@pytest.mark.filterwarnings("default")
def test_a_quantile_is_learnt_by_a_loss_of_ones_own(capsys):
    shares = [
        int(share) for share in re.findall(r"(\d+)% of the numbers lie below", run_example("own_loss.py", capsys))
    ]
    assert 40 <= shares[0] <= 60 and 85 <= shares[1] <= 96


@pytest.mark.filterwarnings("default")
def test_several_labels_are_judged_by_f1(capsys):
    printed = run_example("multilabel.py", capsys)
    assert (
        len(scores := [float(value) for value in re.findall(r"f1_macro (0\.\d+)", printed)]) == 3 and min(scores) > 0.8
    )


@pytest.mark.filterwarnings("default")
def test_a_metric_of_ones_own_can_be_the_headline(capsys):
    assert re.search(r"within a tenth \d+%, 90 % after \d+ rounds", run_example("own_metric.py", capsys))


@pytest.mark.filterwarnings("default")
def test_images_are_read_from_a_folder(capsys):
    pytest.importorskip("PIL")
    reached = [float(value) for value in re.findall(r"accuracy ([01]\.\d+)", run_example("image_folder.py", capsys))]
    assert len(reached) == 2 and min(reached) > 0.8


@pytest.mark.filterwarnings("default")
def test_a_frame_with_owners_is_learnt(capsys):
    pytest.importorskip("pandas")
    pytest.importorskip("torchmetrics")
    shares = [float(value) for value in re.findall(r"R2 (0\.\d+)", run_example("frame_with_owner.py", capsys))]
    assert len(shares) == 2 and min(shares) > 0.7


@pytest.mark.filterwarnings("default")
def test_a_small_transformer_reads_sentences(capsys):
    pytest.importorskip("transformers")
    found = re.search(r"accuracy ([01]\.\d+)", run_example("small_transformer.py", capsys))
    assert found and float(found[1]) > 0.9


@pytest.mark.filterwarnings("default")
def test_a_data_set_of_hugging_face_is_learnt(capsys):
    pytest.importorskip("datasets", reason="the extra hf-data is not installed")
    found = re.search(r"accuracy ([01]\.\d+) on 3 species", run_example("hugging_face_data.py", capsys))
    assert found and float(found[1]) > 0.9


@pytest.mark.filterwarnings("default")
def test_a_classifier_of_hugging_face_reads_sentences(capsys):
    pytest.importorskip("transformers")
    found = re.search(r"accuracy ([01]\.\d+)", run_example("hugging_face_text.py", capsys))
    assert found and float(found[1]) > 0.9


@pytest.mark.filterwarnings("default")
def test_a_decoder_is_pretrained_and_fine_tuned(capfd):
    pytest.importorskip("transformers")
    printed = run_example("hugging_face_decoder.py", capfd)
    found = re.search(r"perplexity ([\d.]+) after the first round, ([\d.]+) after the last", printed)
    assert found and float(found[2]) < 0.7 * float(found[1]) and "saved to" in printed


@pytest.mark.filterwarnings("default")
def test_rouge_l_by_hand_and_in_a_run(capsys, tmp_path):
    pytest.importorskip("transformers")
    assert "ROUGE-L 0.75" in run_example("rouge_l.py", capsys)
    folder, data = write_hf_folder(tmp_path / "llama", "llama"), write_reviews(tmp_path / "texts.csv", label=False)
    small = {"devices": 2, "sample": 2, "rounds": 1, "steps": "1", "split": "iid", "engine": "serial"}
    metrics = (f"{EXAMPLES / 'rouge_l.py'}:RougeL",)
    row = shoal.run(model=f"hf:{folder}", data=str(data), metrics=metrics, **small).history.rows[0]
    assert 0 <= row["accuracy"] <= row["RougeL"] <= 1
