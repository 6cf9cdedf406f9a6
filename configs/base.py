"""Every field of an experiment, with the values most experiments share.

Not an experiment itself: tiny.py, small.py, kimi_linear_48b.py and k3_2p8t.py start from it.
train/config.py knows the types of the fields, also of those that may be None.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """The defaults: K3's architecture at toy size."""
    config = ConfigDict()
    config.model = get_model()

    config.data = data = ConfigDict()
    data.source = "stdlib"  # "stdlib": the running Python's library; "folder": files below path
    data.path = ""  # the folder
    data.pattern = "*.py"  # which files of the folder
    data.context_length = 256  # T, tokens of a row
    data.batch_size = 8  # rows of the global batch
    data.num_streams = 0  # independent; a process runs those of its rows; 0: one a row
    data.seed = 0  # order of the data
    data.shuffle = True

    config.optimizer = optimizer = ConfigDict()
    optimizer.name = "muon"  # Per-Head Muon for matrices and AdamW for the rest, or "adamw"
    optimizer.learning_rate = 1e-2  # peak, of both
    optimizer.schedule = "cosine"  # or "linear"
    optimizer.warmup_fraction = 0.01  # of the steps, linear
    optimizer.final_lr_fraction = 0.1  # of the peak, at the last step
    optimizer.weight_decay = 0.1  # on Muon matrices, embedding and head
    optimizer.clip_norm = 1.0  # global norm of the gradient; None: no clipping
    optimizer.b1 = 0.9  # AdamW
    optimizer.b2 = 0.95
    optimizer.eps = 1e-8
    optimizer.muon_momentum = 0.95
    optimizer.consistent_rms = 0.2  # root mean square of a Muon update, in learning rates
    optimizer.mu_dtype = None  # of first moments; None: the parameters'

    config.step = step = ConfigDict()
    step.loss = ConfigDict()
    step.loss.z_loss = 0.0  # weight of logsumexp(logits)^2
    step.loss.chunk_tokens = 8192  # a device has logits of so many tokens at a time
    step.accumulation = 1  # microbatches of an optimizer step

    config.mesh = mesh = ConfigDict()
    mesh.data = -1  # devices along each axis; -1: what is left. Rows lie over data and expert,
    mesh.expert = 1  # experts over expert,
    mesh.sequence = 1  # the tokens of a row over sequence, large parameters over data and sequence
    mesh.cpu_devices = 1  # devices that JAX makes of the CPU, in each process

    # By name, such as "v5p:16x16x32" (a topology) or "v5p:16x16x32/1048576" (and a context): fields
    # to be changed there; for --layout and train.dryrun.
    config.layouts = ConfigDict()

    config.run = run = ConfigDict()
    run.steps = 100  # optimizer steps
    run.seed = 0  # of the parameters
    run.log_every = 10  # steps between log lines
    run.eval_every = 0  # steps between held-out evaluations; 0: only at the end
    run.eval_context = 0  # tokens of a held-out row; 0: as in training
    run.eval_rows = 256  # held-out rows scored at the end; 0: all
    run.eval_rows_during = 32  # held-out rows scored during training; 0: all
    run.checkpoint_every = 0  # steps between checkpoints; 0: only at the end
    run.keep_checkpoints = 2  # the newest so many stay
    run.max_skipped = 10  # consecutive non-finite steps that stop the run
    run.sample_tokens = 200  # length of the sample at the end
    return config


def get_model() -> ConfigDict:
    """K3's architecture with every size small."""
    model = ConfigDict()
    model.vocab_size = 257  # W; the byte tokenizer has 256 bytes and a document start
    model.dim = 128  # D
    model.layers = "KKKM"  # a letter per decoder layer: K for KDA, M for Gated MLA
    model.num_dense_layers = 1  # the first layers with a dense FFN
    model.dense_hidden = 512  # F of the dense FFN
    model.activation = "situ"  # SiTU-GLU of K3, or "swiglu"
    model.situ_beta = 4.0  # limit of the gate branch
    model.situ_linear_beta = 25.0  # limit of the linear branch; None: no limit
    model.norm_eps = 1e-5  # of all RMSNorms but MLA's inner ones
    model.init_std = 0.02  # of matrices
    model.embedding_std = 0.02
    model.head_std = 0.02
    model.dtype = "bfloat16"  # of activations
    model.param_dtype = "float32"
    # What the backward pass recomputes: "none", "dots" (all but matmuls), "full", or "nested" (all,
    # and each sublayer once more by itself: least memory).
    model.remat = "full"
    model.scan = True  # False: unrolled layers, for debugging
    model.shard_min_size = 2**20  # numbers from which on a parameter is spread over devices

    model.kda = kda = ConfigDict()
    kda.num_heads = 4  # H
    kda.num_value_heads = None  # HV; None: H
    kda.key_dim = 32  # K
    kda.value_dim = 32  # V
    kda.conv_size = 4  # taps of the short convolutions
    kda.gate_kind = "bounded"  # K3's gate, or Kimi Linear's "softplus"
    kda.lower_bound = -5.0  # smallest log-decay of the bounded gate
    kda.gate_rank = None  # rank of the decay gate; None: K
    kda.output_gate = "full"  # K3's full-rank output gate, or "low_rank"
    kda.chunk_size = 64  # rows of a chunk
    kda.num_splits = None  # pieces of a sequence side by side on a GPU; None: by its shape
    kda.implementation = None  # None: the best for the platform

    model.mla = mla = ConfigDict()
    mla.num_heads = 4
    mla.q_lora_rank = None  # rank of the queries; None: full
    mla.kv_lora_rank = 64  # rank of keys and values
    mla.nope_dim = 32  # key width from the latent
    mla.rope_dim = 16  # key width shared by the heads, not rotated (NoPE)
    mla.value_dim = 32
    mla.output_gate = True
    mla.norm_eps = 1e-6  # of the inner norms
    mla.head_block = None  # heads whose keys and values exist at a time; None: all
    mla.implementation = None

    model.moe = moe = ConfigDict()
    moe.num_experts = 16  # E
    moe.top_k = 2
    moe.num_shared_experts = 1  # one MLP of so many times expert_hidden
    moe.expert_hidden = 64  # F of an expert
    moe.latent_dim = None  # R; None: experts at full width
    moe.latent_norm = True  # RMSNorm after the weighted sum
    moe.router = "sigmoid"  # or "softmax"
    moe.combine_scores = "unbiased"  # or "biased": the released Kimi-Linear-48B
    moe.routed_scaling_factor = 1.0
    moe.row_block = 64  # rows of a grouped-matmul block; experts are padded to it
    # Tokens to experts on other devices: "gather", "all_to_all" or "even_all_to_all".
    moe.dispatch = "gather"
    moe.buffer_factor = None  # room of a device for assignments, in even loads; None: for any load
    moe.implementation = None

    model.balance = balance = ConfigDict()
    balance.estimator = "histogram"  # or "quantile", "sign", "aux_loss", "none"
    balance.num_bins = 1000  # of the histogram
    balance.ema = 0.0  # weight of past quantiles; 0: off
    balance.sign_step = 1e-3  # bias step of "sign"
    balance.aux_loss_weight = 1e-2  # of "aux_loss"
    balance.max_margins = 2**26  # "quantile" refuses steps that would keep more

    model.residual = residual = ConfigDict()
    residual.mode = "block"  # Block Attention Residuals; "full" or "none" (plain residual)
    residual.block_size = 4  # decoder layers of a block
    return model
