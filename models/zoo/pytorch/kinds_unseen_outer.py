"""Steps `unseen-*` by PyTorch whose optimizer is outside of the graph: other kinds, with gradients as outputs."""

from models.zoo.pytorch import kinds_unseen_agents as agents
from models.zoo.pytorch import kinds_unseen_methods as methods
from models.zoo.pytorch import kinds_unseen_models as models
from models.zoo.pytorch import kinds_unseen_tuning as tuning
from models.zoo.pytorch.kinds_unseen_table import build
from models.zoo.pytorch.unseen_parts import outside
from models.zoo.unseen import add

ROWS = """
outer-conv-focal: conv focal sgd - acc x0 next
outer-attn-clip: attn ce sgd clip avg mixed
outer-words-logits: words asl sgd - logits exporter
outer-resnorm-poly: resnorm poly1 sgd - acc,avg inout
outer-siren-huber: siren huber sgd - mae donated
outer-rnn-value: rnn mse sgd clipv mae serving
outer-kan-penalty: kan mse sgd - l2 arg
"""
for line in ROWS.strip().splitlines():
    kind, row = line.split(":")
    *parts, faces = row.strip().split(" ", 5)
    parts = ["" if part == "-" else part for part in parts]
    add(kind, "pytorch", outside(lambda parts=parts: build(*parts), "grad_{}"), faces)

OUTER = {
    agents.trl_dpo_smoothed: "x0",
    agents.grpo_group_advantage: "next",
    models.vae_beta_freebits: "mixed",
    models.realnvp_actnorm: "exporter",
    models.ctc_forward: "donated",
    agents.impala_vtrace: "arg",
    models.lightgcn_bpr: "inout",
    models.deepfm_focal_rows: "serving",
    methods.kendall_uncertainty: "mixed",
    methods.simclr_ntxent: "camel",
    tuning.dora_magnitude: "bare",
    methods.vicreg_terms: "anyorder",
    tuning.distill_hinton: "x0",
}
for make, faces in OUTER.items():
    add(f"outer-{make.__name__.replace('_', '-')}", "pytorch", outside(make, "{}.grad"), faces)
