"""Causal language models of Transformers with the output layer: loss, Trainer, files, PEFT."""

import inspect

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers", reason="pip install catnat[hf]")

from catnat.integrations.transformers import from_pretrained, replace_head  # noqa: E402

K = 60


def make_model(kind="gpt2", frequent=10, tie=False, **options):
    return replace_head(make_plain(kind, tie), frequent, order=torch.randperm(K), **options)


def make_plain(kind, tie=False):
    torch.manual_seed(0)
    common = {"vocab_size": K, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    common["tie_word_embeddings"] = tie
    if kind == "gpt2":
        sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(**sizes, **dropout, **common)
    else:
        config = transformers.LlamaConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=32,
            **common,
        )
    return transformers.AutoModelForCausalLM.from_config(config).train()


def tokens(rows=4, length=9):
    torch.manual_seed(1)
    return torch.randint(1, K, (rows, length))


KINDS = pytest.mark.parametrize("kind", ["gpt2", "llama"])


@KINDS
def test_the_loss_is_the_cross_entropy_of_the_logits(kind):
    model = make_model(kind)
    words = tokens()
    labels = words.clone()
    labels[0, 3:6] = -100
    logits = model(words).logits
    assert logits.shape == (4, 9, K)
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    )
    output = model(words, labels=labels, output_hidden_states=True)
    torch.testing.assert_close(output.loss, expected)
    assert output.logits is None and len(output.hidden_states) == 3
    whole = model(words, labels=labels, num_items_in_batch=torch.tensor(7)).loss
    torch.testing.assert_close(whole, expected * (labels[:, 1:] != -100).sum() / 7)
    first = model(words, labels=labels, return_dict=False)[0]
    torch.testing.assert_close(first, expected)
    assert isinstance(model(words, return_dict=False), tuple)
    output.loss.backward()
    head = model.get_output_embeddings()
    assert head.weight.grad.any() and head.shortlist.weight.grad.any()


class Lines(torch.utils.data.Dataset):
    """Sequences of different lengths: the mean of means is not the mean over all tokens."""

    def __init__(self):
        self.words = tokens(rows=8)
        self.labels = self.words.clone()
        self.labels[::2, 4:] = -100

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        # Trainer drops columns that the model's forward does not name
        return {"input_ids": self.words[index], "labels": self.labels[index], "line": index}


def trained(model, folder, batch_size, steps, **options):
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=8 // batch_size,
        max_steps=steps,
        learning_rate=0.1,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
        **options,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=Lines(), eval_dataset=Lines())
    trainer.train()
    return trainer


@KINDS
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_trainer_accumulates_the_gradients_of_one_batch(tmp_path, kind, smoothing):
    pytest.importorskip("accelerate", reason="pip install catnat[hf]")
    weights = []
    for batch_size in (8, 2):
        model = make_model(kind)
        trainer = trained(model, tmp_path, batch_size, 2, label_smoothing_factor=smoothing)
        weights.append(model.state_dict())
        assert trainer.evaluate()["eval_loss"] > 0
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-6)

    # The same steps by hand
    model = make_model(kind)
    lines = Lines()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        logs = model(lines.words).logits[:, :-1].log_softmax(-1)
        target = lines.labels[:, 1:]
        loss = torch.nn.functional.cross_entropy(
            logs.flatten(0, 1), target.flatten(), label_smoothing=smoothing
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.testing.assert_close(weights[0], model.state_dict(), rtol=1e-4, atol=1e-6)


@KINDS
def test_a_saved_model_is_loaded_with_its_order_and_generates(tmp_path, kind):
    model = make_model(kind, frequent=[7, 3, 50], head="natural", tail=0.1).eval()
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(str(tmp_path)).eval()
    words = tokens()
    torch.testing.assert_close(loaded(words).logits, model(words).logits)
    torch.testing.assert_close(loaded(words, labels=words).loss, model(words, labels=words).loss)
    head, expected = loaded.get_output_embeddings(), model.get_output_embeddings()
    assert torch.equal(head.classes, expected.classes) and head.head.tail == 0.1
    states = torch.randn(5, 16)
    drawn = head.sample(states, (200,), torch.Generator().manual_seed(0))
    again = expected.sample(states, (200,), torch.Generator().manual_seed(0))
    assert torch.equal(drawn, again)
    greedy = loaded.generate(words, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert torch.equal(greedy[:, 9], model(words).logits[:, -1].argmax(-1))
    beams = loaded.generate(words, max_new_tokens=3, num_beams=2, do_sample=True, pad_token_id=0)
    assert beams.shape[0] == 4


def test_loading_the_wrong_way_fails(tmp_path):
    make_model().save_pretrained(tmp_path / "tree")
    with pytest.raises(RuntimeError, match=r"size mismatch|ignore_mismatched_sizes"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tree")
    plain = transformers.AutoModelForCausalLM.from_config(
        transformers.GPT2Config(vocab_size=K, n_embd=16, n_layer=1, n_head=2)
    )
    plain.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="no output layer of catnat"):
        from_pretrained(str(tmp_path / "plain"))


@KINDS
def test_a_tied_embedding_keeps_its_weight_and_the_layer_has_its_own(tmp_path, kind):
    with pytest.warns(UserWarning, match="shares the weight.*weights of its own"):
        model = make_model(kind, tie=True)
    before = model.get_input_embeddings().weight.clone()
    assert model.get_output_embeddings().weight.shape == (K - 11, 16)
    model.save_pretrained(tmp_path)
    loaded = from_pretrained(str(tmp_path))
    assert torch.equal(loaded.get_input_embeddings().weight, before)
    torch.testing.assert_close(loaded(tokens()).logits, model(tokens()).logits)


def test_counts_choose_the_frequent_tokens_and_the_biases():
    torch.manual_seed(0)
    counts = torch.randint(0, 100, (K,))
    model = make_model(frequent=np.int64(5), counts=counts)
    head = model.get_output_embeddings()
    assert set(head.classes[:5].tolist()) == set(counts.topk(5).indices.tolist())
    shares = (counts + 1) / (counts + 1).sum()
    torch.testing.assert_close(head.log_probs(torch.zeros(16)).exp(), shares)


@KINDS
def test_a_trained_softmax_becomes_a_layer_that_is_near_it(tmp_path, kind):
    model = make_plain(kind)
    torch.nn.init.normal_(model.lm_head.weight, std=0.3)
    text = tokens(rows=40)
    with torch.no_grad():
        expected = model(text).logits.log_softmax(-1)
    model = replace_head(model, 8, tokens=text, fitted=20)
    assert model.training
    with torch.no_grad():
        found = model(text).logits
    divergence = (expected.exp() * (expected - found)).sum(-1).mean()
    entropy = -(expected.exp() * expected).sum(-1).mean()
    assert divergence < 0.05 * (torch.tensor(K).log() - entropy)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(from_pretrained(str(tmp_path)).train()(text).logits, found)


def test_the_vocabulary_cannot_change():
    model = make_model()
    assert model.resize_token_embeddings(K) is model.get_input_embeddings()
    with pytest.raises(ValueError, match="over 60 tokens cannot become one over 64"):
        model.resize_token_embeddings(64)


def test_models_that_change_their_logits_are_refused():
    config = transformers.Gemma2Config(
        vocab_size=K,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=False,
    )
    model = replace_head(transformers.AutoModelForCausalLM.from_config(config), 5)
    with pytest.raises(ValueError, match="Gemma2ForCausalLM changes the logits"):
        model(tokens(), labels=tokens())
    with pytest.raises(ValueError, match=r"ends in nn\.Linear, got TreeGemma2ForCausalLM"):
        replace_head(model, 5)


def test_the_signature_is_that_of_the_model():
    names = inspect.signature(make_model().forward).parameters
    assert {"input_ids", "attention_mask", "labels"} <= set(names)


def test_adapters_of_peft_learn_and_are_loaded(tmp_path):
    peft = pytest.importorskip("peft", reason="pip install catnat[hf]")
    model = make_model("llama")
    frozen = model.get_output_embeddings().weight.clone()
    config = peft.LoraConfig(target_modules=["q_proj", "lm_head.shortlist"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    optimizer = torch.optim.SGD(adapted.parameters(), lr=0.5)
    losses = []
    for _ in range(5):
        loss = adapted(input_ids=tokens(), labels=tokens()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    changed = [
        name for name, x in adapted.named_parameters() if x.grad is not None and x.grad.any()
    ]
    assert any("shortlist" in name for name in changed) and any(
        "q_proj" in name for name in changed
    )
    assert losses[-1] < losses[0]
    assert torch.equal(model.get_output_embeddings().weight, frozen)
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(make_model("llama"), tmp_path)
    expected = adapted(input_ids=tokens()).logits
    torch.testing.assert_close(again(input_ids=tokens()).logits, expected)
