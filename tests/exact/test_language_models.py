"""Language models of every supported family, small and random: scores, masks, gradients, cached drawing."""

from __future__ import annotations

import pytest
import torch
import transformers
from tokenizers import SentencePieceBPETokenizer, Tokenizer, models, pre_tokenizers, trainers

import structured_voronoi as sv
from structured_voronoi.core.streams import inverse_cdf
from structured_voronoi.targets.language_model import _repeated_rows

TEXTS = ["the old mill serves soup by the river", "a small pub near the bridge", "fish and chips at the market"] * 4


def tokenizer(bos: bool = True) -> transformers.PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=60, special_tokens=["<end>"], show_progress=False))
    names = {"bos_token": "<end>"} if bos else {}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", **names)


def family(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    words = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0, "max_position_embeddings": 32}
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
    elif name == "neox":
        config = transformers.GPTNeoXConfig(**words, **size, intermediate_size=32, tie_word_embeddings=False)
    elif name == "llama":
        config = transformers.LlamaConfig(**words, **size, intermediate_size=32, tie_word_embeddings=False)
    else:
        config = transformers.OPTConfig(
            **words, **size, ffn_dim=32, word_embed_proj_dim=16, dropout=0.0, pad_token_id=1
        )
    return transformers.AutoModelForCausalLM.from_config(config).double().eval().requires_grad_(False)


FAMILIES = ("gpt2", "neox", "llama", "opt")


def language_model(name: str, **settings: object) -> sv.TextTarget:
    return sv.LanguageModel(family(name), tokenizer()).target(**{"max_tokens": 5, **settings})


def some_tokens(target: sv.TextTarget, rows: int = 4) -> torch.Tensor:
    allowed = target.allowed.nonzero().squeeze(-1)
    places = torch.randint(len(allowed), (rows, target.length), generator=torch.Generator().manual_seed(1))
    return allowed[places]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("suffix", ["", " by the river"])
def test_log_prob_equals_that_of_the_network(name: str, suffix: str) -> None:
    """Token by token, from the whole model's logits; the mask holds at sampled positions only."""
    target = language_model(name, prompt="the old", suffix=suffix)
    tokens = some_tokens(target)
    before = [0, *target.tokenizer("the old")["input_ids"]]
    after = target.tokenizer(suffix)["input_ids"] if suffix else []
    for row, found in zip(tokens.tolist(), target.log_prob(tokens), strict=True):
        ids = before + row + after
        logits = target.network(input_ids=torch.tensor([ids])).logits[0]
        expected = 0.0
        for place in range(len(before), len(ids)):
            scores = logits[place - 1].clone()
            if place < len(before) + len(row):
                scores[~target.allowed] = -torch.inf
            expected += float(scores.log_softmax(-1)[ids[place]])
        assert float(found) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", FAMILIES)
def test_gradient_is_that_of_moving_an_embedding(name: str) -> None:
    """Finite differences of log p in the input embedding, plus the hidden state for the output side."""
    target = language_model(name)
    tokens = some_tokens(target, rows=1)
    log_prob, gradient = target.log_prob_and_grad(tokens)
    _, guide = target.log_prob_and_guide(tokens)
    torch.testing.assert_close(log_prob, target.log_prob(tokens))
    table, step = target.network.get_input_embeddings(), 1e-3  # some families normalise in float32
    place, direction = 2, torch.randn(16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    shifted = []
    for sign in (1, -1):
        embeds = table(target._ids(tokens)).clone()
        embeds[:, target.before.shape[1] + place] += sign * step * direction
        hidden = target.network.base_model(inputs_embeds=embeds).last_hidden_state
        shifted.append(target._scores(tokens, hidden)[0].sum())
    numeric = float((shifted[0] - shifted[1]) / (2 * step))
    as_input = (gradient - guide)[0, place]
    expected = direction if target.input_map is None else target.input_map @ direction
    if target.input_map is None:
        assert float(as_input @ expected) == pytest.approx(numeric, rel=2e-3)
    else:  # brought into the output table's space: the same linear map on both sides
        embeds = table(target._ids(tokens)).clone().requires_grad_()
        with torch.enable_grad():
            total = target._scores(tokens, target.network.base_model(inputs_embeds=embeds).last_hidden_state)[0].sum()
            (own,) = torch.autograd.grad(total, embeds)
        own = own[0, target.before.shape[1] + place]
        assert float(own @ direction) == pytest.approx(numeric, rel=2e-3)
        torch.testing.assert_close(as_input, target.input_map @ own)


@pytest.mark.parametrize("name", FAMILIES)
def test_guide_is_exact_for_a_tokens_own_probability(name: str) -> None:
    """The term v·h is linear in the output embedding: differences of the guide's products are logit differences."""
    target = language_model(name)
    tokens = some_tokens(target)
    _, guide = target.log_prob_and_guide(tokens)
    conditionals = target.conditionals(tokens, 0)
    products = guide @ target.embeddings.T
    some = target.allowed.nonzero().squeeze(-1)[:2]
    difference = conditionals[..., some[0]] - conditionals[..., some[1]]
    torch.testing.assert_close(difference, products[..., some[0]] - products[..., some[1]])


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("prompt", "suffix"), [("", ""), ("a small", ""), ("a small", " by the river")])
def test_cached_drawing_follows_the_conditionals(name: str, prompt: str, suffix: str) -> None:
    """The drawn tokens are the conditionals' own, and what stands on the right is scored as in one whole pass."""
    target = language_model(name, prompt=prompt, suffix=suffix)
    tokens = some_tokens(target, rows=8)
    levels = torch.rand(8, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def choose(n: int, scores: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        """By level; the scores are those of the hidden state that comes with them."""
        logits = target.network.get_output_embeddings()(hidden).masked_fill(~target.allowed, -torch.inf)
        torch.testing.assert_close(scores, logits.log_softmax(-1))
        return inverse_cdf(scores, levels[:, n - 1])

    drawn, log_probs, right = target.redraw(tokens, 1, 4, choose)
    scored = target.token_log_probs(drawn)
    torch.testing.assert_close(log_probs, scored[:, 1:])
    torch.testing.assert_close(right, target.log_prob(drawn) - scored.sum(-1))
    assert (drawn[:, 0] == tokens[:, 0]).all()
    assert (drawn[:, 4] == tokens[:, 4]).all()
    conditionals = target.conditionals(drawn, 1)
    for n in range(1, 4):
        torch.testing.assert_close(drawn[:, n], inverse_cdf(conditionals[:, n - 1], levels[:, n - 1]))


def test_excluded_tokens_are_counted_by_reason() -> None:
    model = family("gpt2")
    weights = model.get_output_embeddings().weight
    weights[7] = weights[5]
    target = sv.LanguageModel(model, tokenizer()).target(max_tokens=3)
    assert not target.allowed[0]
    assert not target.allowed[len(target.tokenizer) :].any()
    assert target.allowed[5]
    assert not target.allowed[7]
    assert target.excluded["repeated embedding"] == 1
    assert sv.LanguageModel(model, tokenizer()).target(
        max_tokens=3, allowed=[3, 4]
    ).allowed.nonzero().flatten().tolist() == [3, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(5))
def test_repeated_rows_are_those_that_sorting_finds(dtype: torch.dtype, seed: int) -> None:
    """Of equal rows the first one that may be sampled stays; -0.0 equals 0.0, and NaN nothing."""
    random = torch.Generator().manual_seed(seed)
    table = torch.randint(-1, 2, (2000, 6), generator=random).to(dtype)
    table *= torch.where(torch.rand(table.shape, generator=random) < 0.5, -1, 1).to(dtype)  # some zeros are -0.0
    mask = torch.rand(len(table), generator=random) < 0.7
    table[~mask & (torch.rand(len(table), generator=random) < 0.5), 2] = torch.nan
    repeated = _repeated_rows(table, mask)
    _, inverse = torch.unique(table.nan_to_num(9.0), dim=0, return_inverse=True)
    indices = torch.arange(len(table))
    first = torch.full((len(table),), len(table)).scatter_reduce(0, inverse[mask], indices[mask], "amin")
    assert torch.equal(repeated, mask & (first[inverse] != indices))
    assert 0 < int(repeated.sum()) < int(mask.sum())


def test_a_tokenizer_without_first_token_starts_with_the_end_token_or_the_prompt() -> None:
    model = family("gpt2")
    assert sv.LanguageModel(model, tokenizer(bos=False)).target(max_tokens=3).before.tolist() == [[0]]
    prompted = sv.LanguageModel(model, tokenizer(bos=False)).target("the", max_tokens=3)
    assert prompted.before.tolist() == [prompted.tokenizer("the")["input_ids"]]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"max_tokens": 40}, "context of 32"),
        ({"prompt": "the old mill " * 20}, "shorten the prompt"),
        ({"allowed": [70]}, "token 70"),
    ],
)
def test_wrong_settings_raise_errors(settings: dict[str, object], said: str) -> None:
    with pytest.raises(sv.SamplingError, match=said):
        language_model("gpt2", **settings)


@pytest.mark.parametrize("name", FAMILIES)
def test_half_precision_is_summed_in_single_precision(name: str) -> None:
    """Without a suffix the rest is 0, not the rounding error of bfloat16."""
    target = sv.LanguageModel(family(name).bfloat16(), tokenizer()).target(max_tokens=20)
    tokens = some_tokens(target)
    right = target.log_prob(tokens) - target.token_log_probs(tokens).sum(-1)
    assert right.abs().max() < 1e-4
    redrawn = target.redraw(tokens, 3, 7, lambda n, scores, hidden: scores.argmax(-1))
    assert redrawn.log_probs.dtype == torch.float32
    assert torch.equal(redrawn.tokens[:, 3], target.conditionals(tokens, 3)[:, 0].argmax(-1))


def test_redraws_with_nan_logits_are_rejected_and_counted() -> None:
    """The chains stay where they are."""
    target = language_model("gpt2")
    start = some_tokens(target, rows=3)
    rng = sv.Rng(0, 3)
    state = sv.Refresh().init(target, rng, start)
    target.network.get_output_embeddings().weight[:] = torch.nan
    state, info = sv.Refresh().step(target, rng, state)
    assert torch.equal(state.tokens, start)
    assert info.nonfinite.tolist() == [1, 1, 1]


def test_special_and_unused_tokens_are_left_out() -> None:
    words = tokenizer()
    words.add_tokens([transformers.AddedToken("<header>", special=True)])
    target = sv.LanguageModel(family("gpt2"), words).target(max_tokens=3)
    assert target.excluded["special"] == 2
    assert not target.allowed[words.convert_tokens_to_ids("<header>")]
    assert target.excluded["unused"] == 64 - len(words)


def test_a_suffix_is_encoded_without_a_leading_space() -> None:
    """Tokenizers that begin every text with a space do not put one before the suffix."""
    words = tokenizer()
    words.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    target = sv.LanguageModel(family("gpt2"), words).target(max_tokens=3, suffix="the river")
    assert "".join(words.convert_ids_to_tokens(target.after.tolist())) == "theĠriver"


def sentencepiece_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Of Llama 2's kind: a text begins with a mark for a space, which decoding leaves out."""
    inner = SentencePieceBPETokenizer()
    inner.train_from_iterator(TEXTS, vocab_size=60, show_progress=False)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner._tokenizer, eos_token="<unk>")


def test_a_text_keeps_the_space_that_parts_it_from_its_prompt() -> None:
    words = sentencepiece_tokenizer()
    ids = words("river soup", add_special_tokens=False)["input_ids"]
    assert not words.decode(ids).startswith(" ")
    tokens = torch.tensor(ids)
    after, alone = (
        sv.LanguageModel(family("llama"), words).target(prompt, max_tokens=len(tokens)) for prompt in ("by the", "")
    )
    assert after.decode(tokens) == " river soup"
    assert alone.decode(tokens) == "river soup"  # at the beginning of a text the mark stands for nothing


def test_a_tokenizer_that_keeps_spaces_decodes_texts_without_their_prompt() -> None:
    bundled = sv.load("bundled").target("Near the", max_tokens=2)
    for text in (" river", "river", "."):
        assert bundled.decode(torch.tensor(bundled.tokenizer(text)["input_ids"])) == text
    assert bundled._prompt_text is None
