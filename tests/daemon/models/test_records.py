from tierd.daemon.models.records import expert_names, plan_records
from tierd.daemon.models.spec import ExpertsSpec, ModelSpec

PLAIN = ModelSpec("llama", 2, 64, 96, 4, 2, 16, 320, 256, 1e-5, tied=True)


def test_records_of_a_plain_model():
    records = plan_records(PLAIN)
    assert [r.name for r in records] == ["embed", "layer.0", "layer.1", "final"]
    layer = {t.name: t for t in records[2].tensors}
    assert list(layer) == ["attn_norm", "qkv", "o", "mlp_norm", "gate_up", "down"]
    assert (layer["qkv"].rows, layer["qkv"].cols) == (128, 64)
    assert [(p.slot, p.layer, p.rows) for p in layer["qkv"].parts] == [("q", 1, 64), ("k", 1, 32), ("v", 1, 32)]
    assert [(p.slot, p.rows) for p in layer["gate_up"].parts] == [("gate", 96), ("up", 96)]
    assert (layer["down"].rows, layer["down"].cols) == (64, 96)
    assert layer["attn_norm"].vector and (layer["attn_norm"].rows, layer["attn_norm"].cols) == (1, 64)


def test_everything_optional():
    spec = ModelSpec(
        "qwen3", 1, 64, 96, 4, 2, 32, 320, 256, 1e-5, False, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True
    )
    records = plan_records(spec)
    assert [r.name for r in records] == ["embed", "layer.0", "final", "head"]
    layer = {t.name: (t.rows, t.cols) for t in records[1].tensors}
    assert layer == {
        "attn_norm": (1, 64),
        "qkv": (256, 64),
        "qkv_bias": (1, 256),
        "q_norm": (1, 32),
        "k_norm": (1, 32),
        "o": (64, 128),
        "o_bias": (1, 64),
        "mlp_norm": (1, 64),
        "gate_up": (192, 64),
        "gate_up_bias": (1, 192),
        "down": (64, 96),
        "down_bias": (1, 64),
    }


def test_each_expert_is_a_record_and_its_layer_has_the_router():
    spec = ModelSpec(
        "qwen3_moe", 2, 64, 96, 4, 2, 32, 320, 256, 1e-5, True, experts=ExpertsSpec(3, 2, 24, True, layers=(1,))
    )
    records = plan_records(spec)
    assert [r.name for r in records] == [
        "embed", "layer.0", "layer.1", "expert.1.0", "expert.1.1", "expert.1.2", "final",
    ]  # fmt: skip
    assert expert_names(spec) == {1: ["expert.1.0", "expert.1.1", "expert.1.2"]}
    assert expert_names(PLAIN) == {}
    assert [t.name for t in records[1].tensors][-2:] == ["gate_up", "down"]
    router = records[2].tensors[-1]
    assert (router.name, router.rows, router.cols, router.exact) == ("router", 3, 64, True)
    assert "gate_up" not in [t.name for t in records[2].tensors]
    gate_up, down = records[5].tensors
    assert [(p.slot, p.layer, p.rows, p.expert) for p in gate_up.parts] == [("gate", 1, 24, 2), ("up", 1, 24, 2)]
    assert (down.rows, down.cols, down.exact) == (64, 24, False)


def test_biases_of_experts_and_sink_logits():
    experts = ExpertsSpec(3, 2, 24, True, (0,), bias=True, limit=7.0, slope=1.702)
    spec = ModelSpec("gpt_oss", 1, 64, 24, 4, 2, 32, 320, 256, 1e-5, True, experts=experts, sink_logits=True)
    _, layer, _, expert, *_ = plan_records(spec)
    assert [(t.name, t.cols) for t in layer.tensors if t.vector] == [
        ("attn_norm", 64), ("sink_logits", 4), ("mlp_norm", 64), ("router_bias", 3),
    ]  # fmt: skip
    assert [t.name for t in expert.tensors] == ["gate_up", "gate_up_bias", "down", "down_bias"]
    parts = [(p.slot, p.layer, p.cols, p.expert) for p in expert.tensors[1].parts]
    assert parts == [("gate_bias", 0, 24, 1), ("up_bias", 0, 24, 1)]
