"""Every wrong use has an error that says what, where, expected and got."""

import pytest
import torch

from tapeless.config import ModelConfig, SimpleLMConfig
from tapeless.errors import ConfigError, InputError, NonFiniteError, OrderError
from tapeless.model.build import build_model
from tapeless.model.chain import Chain, layer, residual
from tapeless.model.memory import saved_bytes
from tapeless.model.simple_lm import SimpleLM
from tapeless.model.transformer import Transformer
from tapeless.ops.embed import EMBED
from tapeless.ops.linear import LINEAR
from tapeless.ops.positions import POSITIONS
from tapeless.ops.rms_norm import RMS_NORM
from tapeless.verify.fixtures import TRANSFORMER_CASES, batch, build, shrunk

CASES = {case.name: case for case in TRANSFORMER_CASES}


@pytest.fixture
def model() -> Transformer:
    return build(CASES["llama"], "float32")


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    return batch()


@pytest.mark.parametrize("bad", [23, -1, 10**12])
def test_a_token_outside_the_vocabulary(model: Transformer, data, bad: int):
    tokens, targets = data
    tokens[1, 4] = bad
    message = rf"token \[1, 4\] is {bad}, outside the vocabulary of 23 \(0 to 22\)"
    for call in (lambda: model.forward(tokens, targets), lambda: model.loss(tokens, targets), lambda: model.logits(tokens)):
        with pytest.raises(InputError, match=message):
            call()


def test_a_target_outside_the_vocabulary(model: Transformer, data):
    tokens, targets = data
    targets[0, 2] = 99
    with pytest.raises(InputError, match=r"target \[0, 2\] is 99, outside the vocabulary of 23"):
        model.forward(tokens, targets)
    targets[0, 2] = -1
    with pytest.raises(InputError, match=r"target \[0, 2\] is -1"):
        model.loss(tokens, targets)


def test_wrong_shapes_and_dtypes(model: Transformer, data):
    tokens, targets = data
    with pytest.raises(InputError, match=r"tokens must be int64, got int32; convert with \.long\(\)"):
        model.logits(tokens.int())
    with pytest.raises(InputError, match="targets must be int64, got float32"):
        model.forward(tokens, targets.float())
    with pytest.raises(InputError, match=r"tokens must have the shape \(batch, time\), got \(7,\)"):
        model.logits(tokens[0])
    with pytest.raises(InputError, match=r"targets have the shape \(3, 6\), tokens \(3, 7\); they must be equal"):
        model.forward(tokens, targets[:, 1:])
    with pytest.raises(InputError, match=r"documents have the shape \(2, 7\), tokens \(3, 7\)"):
        model.forward(tokens, targets, documents=tokens[:2])
    with pytest.raises(InputError, match="documents must be int64"):
        model.forward(tokens, targets, documents=tokens.bool())


@pytest.mark.parametrize("shape", [(0, 7), (3, 0)])
def test_an_empty_batch(model: Transformer, shape: tuple[int, int]):
    empty = torch.zeros(shape, dtype=torch.long)
    with pytest.raises(InputError, match="tokens are an empty batch of shape"):
        model.forward(empty, empty)


def test_a_batch_on_another_device(model: Transformer, data):
    with pytest.raises(InputError, match="tokens are on meta, the model is on cpu"):
        model.logits(data[0].to("meta"))


def test_a_divisor_below_one(model: Transformer, data):
    with pytest.raises(InputError, match="num_targets must be a whole number of at least 1, got 0"):
        model.forward(*data, num_targets=0)


def test_sequences_beyond_learned_positions():
    model = build(CASES["gpt2"], "float32")
    tokens, targets = batch(T=10)
    with pytest.raises(InputError, match="sequence of 10 tokens, but max_seq_len is 9 and learned positions end there"):
        model.forward(tokens, targets)
    with pytest.raises(InputError, match="kv_cache for 10 tokens, but max_seq_len is 9"):
        model.kv_cache(3, 10)
    with pytest.raises(InputError, match="sequence of 10 tokens"):
        POSITIONS.forward(torch.zeros(1, 3, 24), model.params["pos.w"], offset=7)


def test_other_positions_have_no_end():
    tokens, targets = batch(T=20)
    for name in ("llama", "cllm"):
        assert build(CASES[name], "float32").loss(tokens, targets).isfinite()


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"hidden_dim": 30, "num_heads": 4}, "hidden_dim 30 is not divisible by num_heads 4; change one, or set head_dim"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_heads 4 is not divisible by num_kv_heads 3"),
        ({"head_dim": 5}, "rotary positions turn features in pairs, but head_dim is 5; make it even"),
        ({"norm_bias": True}, "norm_bias needs norm = 'layer'"),
        ({"ffn": "swigly"}, "ffn is 'swigly'; did you mean 'swiglu'?"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"num_layers": 0}, r"num_layers must be in \[1, 10000\), got 0"),
    ],
)
def test_configurations_that_no_model_can_have(choices: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**choices)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"dtype": "float23"}, "unknown dtype 'float23'; did you mean 'float32'?"),
        ({"recompute": "chep"}, "unknown recompute policy 'chep'; did you mean 'cheap'?"),
        ({"ops": "referense"}, "unknown set of ops 'referense'; did you mean 'reference'?"),
    ],
)
def test_unknown_names_have_a_hint(choices: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        Transformer(CASES["llama"].config, **choices)


@pytest.mark.parametrize("case", TRANSFORMER_CASES, ids=lambda case: case.name)
def test_all_targets_ignored_is_a_loss_of_zero_and_no_gradient(case):
    model, (tokens, targets) = build(case, "float32"), batch()
    loss = model.forward(tokens, torch.full_like(targets, -100), step=0)
    model.backward()
    assert loss == 0
    assert not model.store.flat_grads.any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_weights_are_named(model: Transformer, data, bad: float):
    model.params["blocks.1.ffn.w_up"][3, 5] = bad
    message = rf"blocks\.1\.ffn\.w_up \(13, 24\) holds 1 non-finite values, the first at \[3, 5\]: {bad}"
    for call in (lambda: model.forward(*data), lambda: model.loss(*data), lambda: model.logits(data[0])):
        with pytest.raises(NonFiniteError, match=message):
            call()


def test_backward_needs_its_forward(model: Transformer, data):
    with pytest.raises(OrderError, match="backward without a forward"):
        model.backward()
    model.forward(*data)
    model.backward()
    with pytest.raises(OrderError, match="backward without a forward"):
        model.backward()
    model.loss(*data)
    model.logits(data[0])
    with pytest.raises(OrderError, match="backward without a forward"):
        model.backward()


def test_backward_of_the_wrong_kind(model: Transformer, data):
    message = r"backward\(\) follows forward\(tokens, targets\); backward\(dlogits\) follows logits\(tokens, keep=True\)"
    model.forward(*data)
    with pytest.raises(OrderError, match=message):
        model.backward(torch.zeros(3, 7, 23))
    model.logits(data[0], keep=True)
    with pytest.raises(OrderError, match=message):
        model.backward()


def test_dropout_needs_a_step(data):
    model = build(CASES["penalties"], "float32")
    with pytest.raises(InputError, match=r"dropout, whose masks depend on the step: pass step=; to evaluate, use loss\(\)"):
        model.forward(*data)
    assert model.loss(*data).isfinite()


def test_kv_cache_of_the_wrong_size_or_use(model: Transformer, data):
    tokens, _ = data
    with pytest.raises(InputError, match="kv_cache was made for batches of 2, got 3"):
        model.logits(tokens, kv_cache=model.kv_cache(2, 7))
    with pytest.raises(InputError, match="kv_cache holds 0 of 6 tokens, no room for 7 more"):
        model.logits(tokens, kv_cache=model.kv_cache(3, 6))
    for wrong in ({"keep": True}, {"documents": tokens}):
        with pytest.raises(InputError, match="cannot be differentiated, and takes no documents"):
            model.logits(tokens, kv_cache=model.kv_cache(3, 7), **wrong)


def test_simple_lm_checks_too(data):
    tokens, targets = data
    model = SimpleLM(shrunk(SimpleLMConfig()))
    with pytest.raises(OrderError, match="without a forward"):
        model.backward()
    with pytest.raises(OrderError, match="without a forward"):
        model.backward(torch.zeros(3, 7, 23))
    with pytest.raises(InputError, match="targets have the shape"):
        model.forward(tokens, targets[:, 1:])
    tokens[0, 0] = 23
    with pytest.raises(InputError, match=r"token \[0, 0\] is 23"):
        model.loss(tokens, targets)
    model.params["hidden.w"][0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"hidden\.w"):
        model.logits(targets.clamp_min(0))


def test_parameters_written_between_forward_and_backward_are_an_error():
    model = Transformer(ModelConfig())
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    model.forward(tokens, tokens)
    model.params["embed.w"].mul_(1.5)
    with pytest.raises(OrderError, match="written between forward and backward"):
        model.backward()


@pytest.mark.parametrize("config", [ModelConfig(), SimpleLMConfig()])
def test_a_refused_forward_leaves_nothing_for_backward(config):
    model = build_model(config)
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    model.forward(tokens, tokens)
    with pytest.raises(InputError):
        model.forward(tokens, tokens + 1000)
    with pytest.raises(OrderError, match="backward without a forward"):
        model.backward()


@pytest.mark.parametrize("config", [ModelConfig(), SimpleLMConfig()])
def test_an_upstream_gradient_of_another_shape_is_refused_and_the_right_one_still_taken(config):
    model = build_model(config)
    logits = model.logits(torch.zeros(1, 3, dtype=torch.int64), keep=True)
    with pytest.raises(InputError, match="dlogits must be like the logits"):
        model.backward(logits[:, :2])
    with pytest.raises(InputError, match="dlogits must be like the logits"):
        model.backward(logits.double())
    model.backward(logits)


@pytest.mark.parametrize("config", [ModelConfig(), SimpleLMConfig()])
def test_the_two_kinds_of_backward_are_not_confused(config):
    model = build_model(config)
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    logits = model.logits(tokens, keep=True)
    with pytest.raises(OrderError, match=r"backward\(dlogits\) follows logits"):
        model.backward()
    model.forward(tokens, tokens)
    with pytest.raises(OrderError, match=r"backward\(dlogits\) follows logits"):
        model.backward(logits)


@pytest.mark.parametrize("config", [ModelConfig(), SimpleLMConfig()])
@pytest.mark.parametrize("method", ["forward", "loss"])
def test_a_divisor_below_one_is_refused(config, method):
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(InputError, match="num_targets must be a whole number of at least 1, got 0"):
        getattr(build_model(config), method)(tokens, tokens, num_targets=0)


def test_typos_are_errors_everywhere():
    with pytest.raises(ConfigError, match="unknown recompute policy 'chep'; did you mean 'cheap'"):
        saved_bytes(ModelConfig(), 1, 8, "chep", "float32")
    with pytest.raises(ConfigError, match="unknown dtype 'float16'"):
        saved_bytes(ModelConfig(), 1, 8, "cheap", "float16")
    with pytest.raises(ConfigError, match="unknown dtype 'float16'"):
        build_model(SimpleLMConfig(), dtype="float16")
    with pytest.raises(ConfigError, match="takes a ModelConfig, got SimpleLMConfig"):
        Transformer(SimpleLMConfig())
    with pytest.raises(ConfigError, match="unknown init 'kaimingg'; did you mean 'kaiming'"):
        Chain(layer("a", LINEAR, w=(2, 3), b=None), init="kaimingg")
    with pytest.raises(ConfigError, match="b is missing; None leaves a parameter out"):
        layer("a", LINEAR, w=(2, 3))
    with pytest.raises(ConfigError, match="unknown option epss; did you mean 'eps'"):
        layer("a", RMS_NORM, w=(3,), epss=1e-5)
    with pytest.raises(ConfigError, match="put an embedding before it"):
        Chain(residual(layer("a", EMBED, w=(4, 3)))).forward(torch.tensor([[1]]))


def test_inputs_written_between_forward_and_backward_are_an_error(model, data):
    tokens, targets = (x.clone() for x in data)
    model.forward(tokens, targets)
    targets.fill_(1)
    with pytest.raises(OrderError, match="tokens, targets or documents were written"):
        model.backward()


def test_non_finite_weights_are_named_even_if_no_target_counts(model, data):
    tokens, targets = data
    model.params["blocks.0.attn.wo"][1, 2] = torch.nan
    with pytest.raises(NonFiniteError, match=r"blocks\.0\.attn\.wo"):
        model.forward(tokens, torch.full_like(targets, -100))
