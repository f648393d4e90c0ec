"""Controls: what functions of the text mean, how they are written, gradients of classifiers, what is refused."""

from __future__ import annotations

import copy
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import structured_voronoi as sv
from exact.test_language_models import language_model, some_tokens
from structured_voronoi.controls import BUNDLED_CONTROLS, bundled_controls
from structured_voronoi.controls.classifier import Classifier
from structured_voronoi.controls.parsing import parse_control
from structured_voronoi.controls.predicate import Predicate
from structured_voronoi.controls.text_classifier import TextClassifier
from structured_voronoi.controls.texts import with_weight
from structured_voronoi.models.classifier_training import train_classifier
from structured_voronoi.models.classifiers import CONFIG_FILE, NETWORKS, ClassifierSettings, model_identity
from structured_voronoi.models.corpora import labelled_texts
from structured_voronoi.models.labels import check_labels
from structured_voronoi.models.loading import Loaded
from structured_voronoi.models.restaurants import LABELS, descriptions
from structured_voronoi.problem import starts

TEXTS = ["The mill stands by the river.", "A pub in town.", "RIVER boats"]
NO_TOKENS = torch.zeros(3, 1, dtype=torch.int64)


def probabilities(control: Predicate, texts: list[str] = TEXTS) -> list[float]:
    return control.log_prob(torch.zeros(len(texts), 1, dtype=torch.int64), texts).exp().tolist()


def test_predicates_take_booleans_probabilities_and_log_scores() -> None:
    assert probabilities(Predicate(lambda text: "pub" in text)) == [0, 1, 0]
    assert probabilities(Predicate(lambda text: np.bool_("pub" in text))) == [0, 1, 0]
    assert probabilities(Predicate(lambda text: torch.tensor(0.25))) == pytest.approx([0.25] * 3)
    scored = Predicate(lambda text: -2.5, kind="log_score")
    assert scored.log_prob(NO_TOKENS, TEXTS).tolist() == [-2.5] * 3
    assert scored.bound == math.inf
    assert Predicate(lambda text: -2.5, kind="log_score", bound=0.0).bound == 0
    assert Predicate(len).bound == 0
    assert Predicate(lambda text: math.nan).log_prob(NO_TOKENS, TEXTS).tolist() == [-math.inf] * 3


def test_keywords_are_whole_words_and_regular_expressions_are_searched() -> None:
    assert probabilities(sv.keyword("river")) == [1, 0, 1]
    assert probabilities(sv.keyword("riv")) == [0, 0, 0]
    assert probabilities(sv.keyword("THE river")) == [1, 0, 0]
    assert probabilities(sv.keyword("$5"), ["for $5.", "for $55"]) == [1, 0]
    assert probabilities(sv.regex(r"^A.*\.$")) == [0, 1, 0]


def test_any_of_takes_the_largest_probability() -> None:
    assert probabilities(sv.any_of(sv.keyword("river"), sv.keyword("pub"))) == [1, 1, 1]
    assert probabilities(~sv.any_of(sv.keyword("river"), lambda text: "boats" in text)) == [0, 1, 0]
    assert probabilities(sv.any_of(lambda text: 0.25, lambda text: math.nan)) == pytest.approx([0.25] * 3)
    assert sv.any_of(sv.keyword("river"), sv.keyword("pub")).pattern is not None
    for others in (sv.regex("pub"), ~sv.keyword("pub"), sv.words(2)):  # read in another way
        assert sv.any_of(sv.keyword("river"), others).pattern is None


def test_scores_have_a_bound_unless_it_is_none() -> None:
    assert sv.score(len, bound=500).bound == 500
    assert sv.score(len, bound=None).bound == math.inf
    with pytest.raises(sv.SamplingError, match="above its bound"):
        sv.score(len).log_prob(NO_TOKENS, TEXTS)


@pytest.mark.parametrize("controls", [{"keyword=river": 1.0}, "keyword=river", [3], ["keyword=river"], 3])
def test_controls_that_are_not_a_list_of_controls_raise_errors(controls: object) -> None:
    with pytest.raises(sv.SamplingError) as caught:
        sv.load("bundled").target(controls=controls)  # type: ignore[arg-type]
    assert "sv.keyword" in caught.value.remedy


def test_functions_get_names_of_their_own() -> None:
    target = sv.load("bundled").target(controls=[lambda text: True, lambda text: 0.5, lambda text: 0.25], max_tokens=4)
    assert list(target.weights) == ["predicate", "predicate 2", "predicate 3"]


def test_a_label_has_no_opposite() -> None:
    with pytest.raises(sv.SamplingError, match="has no opposite"):
        ~sv.label("food", "Italian")


def test_weights_are_exponents() -> None:
    model, half = sv.load("bundled"), Predicate(lambda text: 0.5, "half")
    tokens = some_tokens(model.target(max_tokens=4))
    plain = model.target(max_tokens=4).log_prob(tokens)
    for weight in (0.0, 1.0, 2.5):
        target = model.target(controls=[with_weight(half, weight)], max_tokens=4)
        assert target.weights == {"half": weight}
        torch.testing.assert_close(target.log_prob(tokens), (plain + weight * math.log(0.5)).float(), check_dtype=False)
    for weight in (-1.0, math.inf, "2", True):
        with pytest.raises(sv.SamplingError, match="the weight of half"):
            model.target(controls=[with_weight(half, weight)], max_tokens=4)


def test_bounds_and_allowed_words() -> None:
    assert probabilities(sv.words(3, 4)) == [0, 1, 0]
    assert probabilities(sv.words(most=2)) == [0, 0, 1]
    assert probabilities(sv.words(4)) == [1, 1, 0]
    assert probabilities(sv.words(2, 2), ["a-b c", " a\n\tb ", "a", ""]) == [1, 1, 0, 0]
    assert probabilities(sv.words(most=0), ["", " ", "a"]) == [1, 1, 0]
    assert probabilities(sv.characters(2, 3), ["a", " é", "abc", "a\nbc"]) == [0, 1, 1, 0]
    texts = ["A pub, a PUB!", "a public pub", "", "don't", "pub_a", "a café"]
    assert probabilities(sv.only(["a", "pub", "don't"]), texts) == [1, 0, 1, 1, 0, 0]
    assert probabilities(~sv.words(3, 4)) == [1, 0, 1]
    assert probabilities(~sv.only(["a"])) == [1, 1, 1]


@pytest.mark.parametrize(
    ("expression", "text", "matches"),
    [
        ("(a+)+$", "a" * 60 + "b", False),
        ("(x+x+)+y", "x" * 60 + "£", False),
        (r"^(\w+\s?)*$", "The mill stands by the river and serves café food for less than £20.", False),
        (r"^(\w+\s?)*$", "The mill stands by the river and serves café food for less than", True),
        (r"(\w|é)*!", "éé" * 40, False),
        (r".*.*.*.*.*.*.*=", "a" * 400, False),
        (r"(a|b)*a(a|b){20}$", "ab" * 40 + "c", False),
    ],
)
def test_expressions_that_would_take_for_ever_are_matched_at_once(expression: str, text: str, matches: bool) -> None:
    before = time.monotonic()
    assert probabilities(sv.regex(expression), [text]) == [matches]
    assert time.monotonic() - before < 2


def test_negation() -> None:
    assert probabilities(~sv.keyword("river")) == [0, 1, 0]
    assert probabilities(~Predicate(lambda text: 0.25)) == pytest.approx([0.75] * 3)
    assert probabilities(~~sv.keyword("river")) == [1, 0, 1]
    assert (~sv.regex("a")).name == "not regex=a"
    with pytest.raises(sv.SamplingError, match="no opposite"):
        ~Predicate(len, kind="log_score")


@pytest.mark.parametrize(
    ("predicate", "said"),
    [
        (Predicate(lambda text: -1.0, "mine"), r"mine gave -1\.0 .* no probability; .*kind='log_score'"),
        (Predicate(lambda text: 1.5, kind="probability"), "no probability"),
        (Predicate(lambda text: text), "gave 'The mill"),
        (Predicate(lambda text: None), "gave None"),
        (
            Predicate(lambda text: 1 / 0, "mine"),
            r"mine failed on the text .The mill .*\(test_controls.py, line \d+: ZeroDivisionError: division by zero\)",
        ),
        (Predicate(lambda text: 2.0, kind="log_score", bound=1.0), r"above its bound of 1\.0"),
    ],
)
def test_impossible_scores_are_refused(predicate: Predicate, said: str) -> None:
    with pytest.raises(sv.SamplingError, match=said):
        predicate.log_prob(NO_TOKENS, TEXTS)


def test_unusable_predicates_are_refused() -> None:
    for make, said in (
        (lambda: Predicate("river"), "needs a function"),
        (lambda: Predicate(len, kind="log"), "kind = 'log' is unknown"),
        (lambda: sv.keyword(" "), "is empty"),
        (lambda: sv.regex("("), "not a regular expression"),
        (lambda: sv.regex("(" * 5000 + "a" + ")" * 5000), "…' is nested too deeply; write it with fewer groups"),
        (lambda: sv.regex("a{99999999999}"), r"not a regular expression \(the repetition number is too large"),
        (
            lambda: sv.regex("(a{1,1000}){1000}"),
            "exponential time.*more than 5,000 nodes.*a Python function",
        ),
        (lambda: sv.regex(r"((\w+) \2)+"), "exponential time.*groupref"),
        (lambda: sv.words(), "words without a bound"),
        (lambda: sv.words(-1), "words cannot be -1"),
        (lambda: sv.words(1.5), "words cannot be 1.5"),
        (lambda: sv.characters(5, 3), "characters=5..3 leaves nothing; write characters=3..5"),
        (lambda: sv.only("a pub"), r"needs a list of words; write only\(\['a', 'pub'\]\)"),
        (lambda: sv.only([]), "names no word"),
        (lambda: sv.any_of(), "any_of takes"),
        (lambda: sv.any_of(sv.keyword("a"), sv.score(len)), "any_of takes"),
    ):
        with pytest.raises(sv.SamplingError, match=said):
            make()


def test_parsed_controls_have_their_name_and_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rules.py").write_text("def short(text):\n    return len(text) < 20\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    expected = {
        "keyword=river": ("keyword=river", 1.0),
        "keyword=river@2": ("keyword=river", 2.0),
        "regex=a=b@c": ("regex=a=b@c", 1.0),
        r"regex=\w+@\w+@0.5": (r"regex=\w+@\w+", 0.5),
        "not keyword=the river@3": ("not keyword=the river", 3.0),
        "not regex=x@y": ("not regex=x@y", 1.0),
        "words=5..12@2": ("words=5..12", 2.0),
        "words=..12": ("words=..12", 1.0),
        "words= 5 ..": ("words=5..", 1.0),
        "not characters=7": ("not characters=7..7", 1.0),
        "only=a,cheap,pub": ("only=a,cheap,pub", 1.0),
        "food=Fast food@1.5": ("food=Fast food", 1.5),
        "my_rules:short": ("my_rules:short", 1.0),
        "not my_rules:short": ("not my_rules:short", 1.0),
        f"{BUNDLED_CONTROLS}/area=riverside": ("area=riverside", 1.0),
    }
    for written, (name, weight) in expected.items():
        control = parse_control(written)
        assert (control.name, control.weight) == (name, weight)
    assert probabilities(parse_control("my_rules:short")) == [0, 1, 1]


def test_the_current_folder_comes_last_when_a_control_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("rules_of_this_folder", "wave", "math"):
        (tmp_path / f"{name}.py").write_text("def short(text):\n    return len(text) < 20\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "wave", raising=False)
    assert parse_control("rules_of_this_folder:short").name == "rules_of_this_folder:short"
    assert sys.path[-1] == str(tmp_path)
    assert sys.path.count(str(tmp_path)) == 1
    for name in ("wave", "math"):
        hidden = rf"Python imports another module {name} \(.*\) and not {tmp_path / name}\.py; rename that file"
        with pytest.raises(sv.SamplingError, match=hidden):
            parse_control(f"{name}:short")
    monkeypatch.delitem(sys.modules, "rules_of_this_folder")


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("fod=Italian", "did you mean 'food'"),
        ("food=Italien", "did you mean 'Italian'.*known: Chinese"),
        ("food", "names no value"),
        ("not food=Italian", "negates a classifier"),
        ("wrds=5", "did you mean 'words'"),
        ("words", "names no value"),
        ("words=", "words= has no bounds; write words=5..12"),
        ("words=..", "has no bounds"),
        ("words=five", "has no bounds"),
        ("characters=5...7", "has no bounds"),
        ("characters=7..5", "leaves nothing"),
        ("only=,", "names no word"),
        ("keyword=river@-1", "not a number ≥ 0"),
        ("./nowhere=x", "no folder ./nowhere"),
        ("./nowhere", "names no label"),
        ("no_such_module:f", "cannot be imported"),
        ("math:no_such", "no function or control 'no_such'"),
        ("", "is unknown"),
    ],
)
def test_wrong_controls_raise_errors(written: str, said: str) -> None:
    with pytest.raises(sv.SamplingError, match=said):
        parse_control(written)


def test_the_bundled_classifiers_are_small_and_know_their_labels() -> None:
    assert {name: set(labels) for name, labels in bundled_controls().items()} == {
        name: {*labels, "none"} for name, labels in LABELS.items()
    }
    assert sum(path.stat().st_size for path in BUNDLED_CONTROLS.rglob("*")) < 1.5e6


@pytest.mark.parametrize("name", LABELS)
def test_a_bundled_classifier_reads_fresh_texts(name: str) -> None:
    model = sv.load("bundled").target()
    for one in list(descriptions(40, seed=99)):
        label = one.labels.get(name, "none")
        control = Classifier.load(name, label).bind(model)
        tokens = torch.tensor([model.tokenizer(one.text)["input_ids"]])
        assert control.log_prob(tokens, [one.text]).exp() > 0.5, (one.text, label)


def random_classifier(kind: str, model: sv.TextTarget, label: str = "b") -> Classifier:
    """Untrained, and so sure of itself that its gradient matters."""
    torch.manual_seed(3)
    identity = model_identity(Loaded(model.network, model.tokenizer))
    network = NETWORKS[kind](identity["width"], 6, 3, scale=20.0).double().eval().requires_grad_(False)
    config = {"classifier": kind, "labels": ["a", "b", "c"], "model": identity}
    return Classifier(network, config, "random", label).bind(model)


@pytest.mark.parametrize("kind", ["light", "probe"])
def test_gradients_agree_with_finite_differences(kind: str) -> None:
    model = language_model("gpt2")
    control = random_classifier(kind, model)
    tokens = some_tokens(model, rows=2)
    found, gradient = control.log_prob_and_grad(tokens, ["", ""])
    assert torch.allclose(found, control.log_prob(tokens, ["", ""]), atol=1e-12)
    table = model.network.get_input_embeddings()
    direction = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def at(step: float) -> torch.Tensor:
        return control.soft_log_prob_and_grad(table(tokens) + step * direction)[0]

    slope = (at(1e-6) - at(-1e-6)) / 2e-6
    assert torch.allclose(slope, (gradient * direction).sum((1, 2)), rtol=1e-5, atol=1e-9)
    assert slope.abs().min() > 1e-3


@pytest.mark.parametrize("kind", ["light", "probe"])
def test_gradients_reach_the_output_table_of_untied_models(kind: str) -> None:
    """The geometry is the output table: the gradient there is the input's, brought over by the fitted map."""
    model = language_model("llama")
    control = random_classifier(kind, model)
    tokens = some_tokens(model, rows=2)
    embeds = model.network.get_input_embeddings()(tokens).detach().requires_grad_()
    (at_input,) = torch.autograd.grad(control._score(model, embeds).sum(), embeds)
    mapped = torch.linalg.lstsq(model.embeddings, model.network.get_input_embeddings().weight).solution
    assert torch.allclose(control.log_prob_and_grad(tokens, [])[1], at_input @ mapped.T, atol=1e-5)


@pytest.mark.parametrize("kind", ["light", "probe"])
def test_labels_share_one_distribution_and_rows_do_not_see_each_other(kind: str) -> None:
    model = language_model("gpt2")
    tokens = some_tokens(model, rows=8)
    parts = [random_classifier(kind, model, label).log_prob(tokens, []) for label in "abc"]
    assert torch.allclose(torch.stack(parts).exp().sum(0), torch.ones(8).double())
    alone = random_classifier(kind, model, "a").log_prob(tokens[2:3], [])
    assert torch.allclose(alone, parts[0][2:3], atol=1e-12)


@pytest.mark.parametrize("kind", ["light", "probe"])
def test_padding_does_not_show(kind: str) -> None:
    """In training short texts stand beside long ones."""
    torch.manual_seed(0)
    network = NETWORKS[kind](4, 6, 3).double().eval()
    states = torch.randn(2, 9, 8 if kind == "probe" else 4, dtype=torch.float64)  # embeddings, and hidden states
    padded = network(states, torch.tensor([9, 5]))
    assert torch.allclose(padded[1:], network(states[1:, :5], torch.tensor([5])), atol=1e-12)


def test_controlled_targets_add_up_what_steers_and_what_does_not() -> None:
    model = language_model("gpt2")
    light, probe = random_classifier("light", model), random_classifier("probe", model, "c")
    probe.name = "other=c"
    soft = Predicate(lambda text: 0.5 if "e" in text else 0.125, "soft")
    target = model.under([with_weight(light, 1.5), with_weight(probe, 0.5), with_weight(soft, 2.0)])
    tokens = some_tokens(model, rows=3)
    texts = target.decode_all(tokens)
    weighted = [weight * control.log_prob(tokens, texts) for control, weight in ((light, 1.5), (probe, 0.5), (soft, 2))]
    whole = model.log_prob(tokens) + sum(weighted)
    assert torch.allclose(target.log_prob(tokens), whole, rtol=0, atol=1e-10)
    guided, guide = target.log_prob_and_guide(tokens)
    steered, gradient = target.log_prob_and_grad(tokens)
    assert torch.allclose(guided, whole, rtol=0, atol=1e-10)
    assert torch.allclose(steered, whole, rtol=0, atol=1e-10)
    of_light, of_probe = (control.log_prob_and_grad(tokens, texts)[1] for control in (light, probe))
    assert torch.allclose(guide, model.log_prob_and_guide(tokens)[1] + 1.5 * of_light, rtol=0, atol=1e-10)
    expected = model.log_prob_and_grad(tokens)[1] + 1.5 * of_light + 0.5 * of_probe
    assert torch.allclose(gradient, expected, rtol=0, atol=1e-10)


def test_a_classifier_refuses_another_models_tokens() -> None:
    food, model = Classifier.load("food", "Italian"), sv.load("bundled").target(max_tokens=4)
    with pytest.raises(sv.SamplingError, match="not bound to a language model"):
        food.log_prob(torch.zeros(1, 4, dtype=torch.int64), [""])
    with pytest.raises(sv.SamplingError, match=r"another language model \(901 tokens .* train one"):
        language_model("gpt2").under([food])
    other = copy.deepcopy(model.network)
    other.get_input_embeddings().weight.mul_(-1)
    with pytest.raises(sv.SamplingError, match="different embeddings"):
        food.bind(sv.LanguageModel(other, model.tokenizer).target(max_tokens=4))
    for dtype in ("bfloat16", "float64"):
        kept = food.bind(sv.load("bundled", dtype=dtype).target(max_tokens=4))
        assert kept.log_prob(torch.full((1, 4), 300), [""]).isfinite().all()


def test_the_error_without_a_start_names_the_control(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = starts.SearchLimits(redraws=100, seconds=0)
    monkeypatch.setattr(starts, "SEARCH_LIMITS", limits)
    model = sv.load("bundled").target(max_tokens=2)
    target = model.under([Predicate(lambda text: "zebra" in text, "zebra"), Predicate(lambda text: True, "fine")])
    with pytest.raises(sv.SamplingError, match=r"none of their 200 redraws .*zebra is violated by 100%") as e:
        sv.sample(target, sv.Refresh(), chains=2, draws=1, progress=False)
    assert "fine" not in str(e.value)


@pytest.mark.parametrize("kind", ["light", "probe"])
def test_training_learns_saves_and_reports(kind: str, tmp_path: Path) -> None:
    """A class is rare; the texts hold its word or do not."""
    source = np.random.default_rng(0)
    words = ["soup", "river", "pub", "market"]
    texts = [" ".join(source.choice(words, size=source.integers(3, 6))) for _ in range(150)]
    texts[::6] = [f"{text} by the bridge" for text in texts[::6]]
    labels = ["rare" if "bridge" in text else "common" for text in texts]
    model = language_model("gpt2", max_tokens=6)
    recipe = ClassifierSettings(kind=kind, hidden=24, epochs=80 if kind == "light" else 25)
    loaded = Loaded(model.network.float(), model.tokenizer)
    noted: list[str] = []
    report = train_classifier(
        texts, labels, loaded, tmp_path / "own", recipe, lambda note, steps: noted.extend([note] * steps)
    )
    assert len(noted) == recipe.steps(len(texts))
    assert report["classes"]["rare"]["count"] == max(1, round(labels.count("rare") / 10))
    again = train_classifier(texts, labels, loaded, tmp_path / "again", recipe, lambda note, steps: None)
    assert again == report
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == ["config.json", "model.safetensors"]
    control = Classifier.load(tmp_path / "own", "rare").bind(
        sv.LanguageModel(model.network, model.tokenizer).target(max_tokens=6)
    )
    assert control.name == "own=rare"
    assert hasattr(control, "log_prob_and_guide") == (kind == "light")
    assert report["macro_f1"] > 0.7, report
    (tmp_path / "own" / CONFIG_FILE).write_text(json.dumps({"classifier": kind}))
    with pytest.raises(sv.SamplingError, match="cannot be loaded"):
        Classifier.load(tmp_path / "own", "rare")


def test_labelled_texts(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('﻿text,mood\n"one, two",good\nthree,\n four  five ,bad\nsix,bad\n', encoding="utf-8")
    assert labelled_texts(str(path), "text", "mood") == (["one, two", "four five", "six"], ["good", "bad", "bad"])
    assert labelled_texts(str(path), "text", "mood", limit=1).texts == ["one, two"]
    (tmp_path / "a.tsv").write_text('text\tmood\nsay "yes\tgood\nno\tbad\n')
    assert labelled_texts(str(tmp_path / "a.tsv"), "text", "mood").texts == ['say "yes', "no"]
    some = labelled_texts("builtin", "text", "area", limit=50)
    assert set(some.labels) == {"riverside", "city centre", "none"}
    for data, column, said in (
        (str(path), "moods", "no column 'moods'; did you mean 'mood'"),
        (str(tmp_path / "nowhere.csv"), "mood", "cannot be read"),
        ("a.txt", "mood", "not a .csv or .tsv file"),
        ("builtin", "fod", "did you mean 'food'"),
    ):
        with pytest.raises(sv.SamplingError, match=said):
            labelled_texts(data, "text", column)
    for labels, said in ((["a", "a"], "two labels or more"), (["a", "a", "b"], "'b' has a single text")):
        with pytest.raises(sv.SamplingError, match=said):
            check_labels(labels)


def test_a_sequence_classifier_on_the_decoded_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: place for place, word in enumerate(["[PAD]", "[UNK]", "river", "pub", "the", "by", "a"])}
    inner = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=7, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=16, initializer_range=1.0,
        id2label={0: "calm", 1: "loud", 2: "odd"}, label2id={"calm": 0, "loud": 1, "odd": 2},
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path / "moods")
    tokenizer.save_pretrained(tmp_path / "moods")
    control = TextClassifier.load(tmp_path / "moods", "loud")
    assert control.name == "moods=loud"
    texts = ["by the river", "a pub", "the pub by the river a pub"] * 30
    tokens = torch.zeros(90, 1, dtype=torch.int64)
    with torch.no_grad():
        expected = [model(**tokenizer(text, return_tensors="pt")).logits.log_softmax(-1)[0, 1] for text in texts]
    assert torch.allclose(control.log_prob(tokens, texts).float(), torch.stack(expected), atol=1e-5)
    empty = control.log_prob(tokens[:3], ["", "a pub", " "])  # as a text that ends at once
    assert empty.isfinite().all()
    assert empty[0] == empty[2]
    assert TextClassifier.load(tmp_path / "moods", 1).name == "moods=loud"
    assert parse_control(f"{tmp_path}/moods=odd@2").name == "moods=odd"
    with pytest.raises(sv.SamplingError, match="known: 0, 1, 2, calm, loud, odd"):
        TextClassifier.load(tmp_path / "moods", "sad")
    with pytest.raises(sv.SamplingError, match="cannot be loaded"):
        TextClassifier.load(tmp_path, "sad")


@pytest.mark.slow
def test_chains_start_from_texts_that_satisfy_hard_constraints() -> None:
    """Each is met by few ancestral texts; a chain's start does not depend on the chains beside it."""
    model = sv.load("bundled").target(max_tokens=16)
    target = model.under([sv.keyword("river"), sv.regex("cheap|low|affordable")])
    four, two = (sv.Refresh().init(target, sv.Rng(0, chains), None).tokens for chains in (4, 2))
    assert target.log_prob(four).isfinite().all()
    assert torch.equal(four[:2], two)


def test_chains_start_from_texts_with_a_word_that_redraws_do_not_find() -> None:
    target = sv.load("bundled").target("Near the", [sv.keyword("river"), ~sv.keyword("by")], max_tokens=6)
    three, one = (sv.Refresh().init(target, sv.Rng(0, chains), None).tokens for chains in (3, 1))
    assert target.log_prob(three).isfinite().all()
    assert torch.equal(three[:1], one)


def test_random_starts_satisfy_hard_constraints() -> None:
    model = sv.load("bundled").target(max_tokens=12)
    target = model.under([sv.keyword("river")])
    led = sv.Refresh().init(target, sv.Rng(0, 2), "random").tokens
    blind = sv.Refresh().init(model, sv.Rng(0, 2), "random").tokens
    assert target.log_prob(led).isfinite().all()
    assert not target.log_prob(blind).isfinite().any()


def test_nan_is_impossible_also_when_negated() -> None:
    unknown = Predicate(lambda text: float("nan"), "unknown")
    for control in (unknown, ~unknown):
        assert (control.log_prob(NO_TOKENS, TEXTS) == -torch.inf).all()
    quarter = Predicate(lambda text: 0.25, "quarter")
    assert (~quarter).log_prob(NO_TOKENS, TEXTS).exp().tolist() == pytest.approx([0.75] * len(TEXTS))


def test_a_function_that_returns_an_array_is_named() -> None:
    with pytest.raises(sv.SamplingError, match="the control many failed on the text"):
        Predicate(lambda text: np.zeros(2), "many").log_prob(NO_TOKENS, TEXTS)
