"""Every key of an experiment's config with its default, and what it means."""

from ml_collections import config_dict

# Keys that may change when a run is resumed, without --allow_config_change: the update of a step does
# not depend on the hardware, on the number of micro-batches, or on anything that only observes. A name
# that ends in a dot stands for all keys of a section.
HARMLESS = (
    "runtime.strategy",
    "runtime.logical_devices",
    "runtime.devices",
    "runtime.all_reduce.algorithm",
    "runtime.all_reduce.packs",
    "runtime.all_reduce.bucket_mib",
    "runtime.all_reduce.timeout",
    "runtime.cluster.",
    "runtime.xla",
    "runtime.deterministic",
    "runtime.allow_unkeyed_random",
    "runtime.allow_row_coupling",
    "runtime.gpu.",
    "runtime.tpu.",
    "data.placement",
    "data.prefetch",
    "data.cache",
    "data.skip_damaged",
    "data.tfrecord.parallel_calls",
    "optimizer.gradient_accumulation_steps",
    "optimizer.shard_state",
    "train.",
    "summaries.",
    "eval.",
    "actions",
)


# Sections whose keys the experiment chooses: those of its own model, arguments of functions, and names
# of its models.
FREE_SECTIONS = ("model", "optimizer.arguments", "optimizer.schedule_arguments", "init.models")


def _duration(steps: int) -> config_dict.FieldReference:
    """Returns a number of steps that may be replaced by a text such as "90 epochs"."""
    # Of any type, because ConfigDict rejects a string where the default is an integer.
    return config_dict.FieldReference(steps, field_type=object)


def defaults() -> config_dict.ConfigDict:
    """Returns an unlocked config with every key at its default."""
    config = config_dict.ConfigDict()

    # The class to train, a subclass of ctl.StandardTrainer: path/to/file.py:Class (relative to the
    # folder of the config file, or else to the current folder) or package.module:Class.
    config.trainer = ""
    # Determines the initial weights, the order of the data and the random layers.
    config.seed = 0

    config.init = init = config_dict.ConfigDict()
    # Start from the weights of another run: its workdir, its folder of checkpoints (the newest is
    # used), or one checkpoint, such as runs/a/checkpoints/ckpt-500. "": random initial weights.
    init.checkpoint = ""
    # The variables to restore, as patterns of names such as ["conv*/*", "dense/kernel"]; empty: all.
    init.variables = []
    # Load the averages of the weights of these runs (optimizer.ema_decay) instead of the weights.
    init.averages = False
    # The same for further models of the trainer, by attribute: init=dict(models=dict(teacher="runs/a"))
    # starts self.teacher from the weights of that run's model.
    init.models = config_dict.ConfigDict()

    config.runtime = runtime = config_dict.ConfigDict()
    # auto, default, one_device, mirrored, central_storage, multi_worker_mirrored, parameter_server,
    # tpu; see docs/hardware.md.
    runtime.strategy = "auto"
    # The devices to use, such as ["GPU:0", "GPU:2"]; empty: all (one_device: the first).
    runtime.devices = []
    # Split the first GPU, or the CPU if there is no GPU, into this many devices; 0: do not split.
    runtime.logical_devices = 0
    runtime.gpu = gpu = config_dict.ConfigDict()  # by default TensorFlow reserves all GPU memory
    gpu.memory_growth = False  # reserve memory only as it is needed
    gpu.memory_limit_mib = 0  # reserve this many MiB of each GPU; 0: no limit
    # With the strategy tpu or auto; without a name or an address: this machine's TPU.
    runtime.tpu = tpu = config_dict.ConfigDict()
    tpu.name = ""  # the name of a Google Cloud TPU
    tpu.zone = ""  # the zone of the TPU; "": the zone of this machine
    tpu.project = ""  # the project of the TPU; "": the project of this machine
    tpu.address = ""  # in place of a name, the address of a worker of the TPU: grpc://HOST:PORT
    # float32, float64, or mixed precision with bfloat16 or float16 layers and float32 variables.
    runtime.precision = "float32"
    runtime.loss_scale = 0.0  # with float16: a fixed loss scale; 0: a dynamic one
    # What XLA compiles: off, loop (many complete steps; one replica), step (one complete step; one
    # replica), gradients (the forward and backward pass), autocluster (the parts that TensorFlow
    # selects), auto (the fastest of these that is supported by the strategy and the model).
    runtime.xla = "auto"
    # Compute the gradient as the sum of this many shards in a fixed order: the same bits on any number
    # of replicas that divides it. The all-reduce transfers this many times the bytes. 0: off.
    runtime.logical_shards = 0
    runtime.all_reduce = all_reduce = config_dict.ConfigDict()
    all_reduce.dtype = ""  # bfloat16 halves the bytes of the all-reduce; "": the gradients' dtype
    # powersgd, float16 or bfloat16: compress the gradients, and add what is lost to the next ones; "":
    # off. Updates are then no longer a function of the global batch alone. See docs/step.md.
    all_reduce.compression = ""
    all_reduce.rank = 0  # with powersgd: the rank of the factors that are sent, such as 2
    all_reduce.compression_start = 0  # the first step that is compressed
    # auto, nccl (GPUs), hierarchical_copy (GPUs of one machine), one_device, ring (several processes)
    all_reduce.algorithm = "auto"
    all_reduce.packs = 1  # the parts that nccl and hierarchical_copy split an all-reduce into
    # With several processes: reduce the gradients in groups of about this many MiB, each as soon as the
    # backward pass has computed it; 0: one group after the backward pass. See docs/hardware.md.
    all_reduce.bucket_mib = 0.0
    all_reduce.timeout = 0.0  # seconds that a process waits for the others in one; 0: no limit
    runtime.cluster = cluster = config_dict.ConfigDict()  # of several processes (TF_CONFIG)
    cluster.start_timeout = 600.0  # seconds to wait until all processes have started
    cluster.heartbeat_timeout = 30.0  # seconds until an unreachable process counts as lost
    # Split variables into shards of at least this many MiB, at most one per parameter server; 0: do
    # not split.
    cluster.shard_mib = 0.0
    # TensorFlow's op determinism: the same bits in every run on GPUs too, but slower.
    runtime.deterministic = False
    # Accept random operations that ctl cannot key by row, such as tf.random.uniform in a layer: the
    # update then depends on how the batch is split, and on how often the run was resumed.
    runtime.allow_unkeyed_random = False
    # Accept losses in which a row depends on other rows of its replica or micro-batch, such as local
    # negatives: the update then depends on how the batch is split.
    runtime.allow_row_coupling = False

    config.data = data = config_dict.ConfigDict()
    # The folder of the dataset, which build_dataset reads as self.options.data.dir. A relative path is
    # searched in the current folder, then in that of the config file.
    data.dir = ""
    # The number of examples per update. Set either this key or data.per_replica_batch_size.
    data.global_batch_size = 0
    data.per_replica_batch_size = 0  # the number of examples per update and replica
    # stream, or device: hold the arrays in device memory and transfer only indices (xla=loop).
    data.placement = "stream"
    data.prefetch = -1  # batches that the input pipeline prepares ahead; -1: tf.data chooses
    # Keep parsed examples, before the augmentation: memory, or a folder, which several runs may share;
    # "": parse them again in each epoch. See docs/data.md.
    data.cache = ""
    # For ctl.data.records: replace a record whose checksum is wrong by the next one, and log it.
    data.skip_damaged = False
    # Train and evaluate on this many batches only, the first ones; 0: all data. See docs/running.md.
    data.overfit_batches = 0
    data.tfrecord = tfrecord = config_dict.ConfigDict()  # for ctl.data.tfrecords
    tfrecord.interleave = 4  # files that are read at the same time
    tfrecord.parallel_calls = -1  # records that are parsed at the same time; -1: tf.data chooses
    tfrecord.cache = False  # keep the parsed examples in memory
    tfrecord.shuffle_buffer = 10_000  # examples in the shuffle buffer in training; 0: no shuffling

    # The experiment's own keys, which build_model reads as self.options.model.
    config.model = config_dict.ConfigDict()

    config.optimizer = optimizer = config_dict.ConfigDict()
    # adam, adamw, sgd, rmsprop, adagrad, lion, adamax, adadelta, ftrl, adafactor, lamb, lars, or
    # package.module:function; see docs/optimizers.md.
    optimizer.name = "adam"
    # Further arguments of the optimizer's class, such as beta_2 or epsilon.
    optimizer.arguments = config_dict.ConfigDict()
    optimizer.learning_rate = 1e-3  # the highest rate, which the schedule multiplies
    # If not 0, learning_rate is for this global batch size and is scaled linearly with the actual one
    # (Goyal et al. 2017, "Accurate, large minibatch SGD").
    optimizer.learning_rate_batch_size = 0
    # constant, cosine, linear, polynomial, exponential, piecewise, inverse_sqrt, cosine_restarts, or
    # package.module:function.
    optimizer.schedule = "constant"
    # Arguments of the schedule, such as end_factor: the last rate as a fraction of learning_rate.
    optimizer.schedule_arguments = config_dict.ConfigDict()
    optimizer.warmup_steps = _duration(0)  # updates of linear warm-up from 0 before the schedule
    # Updates of the decay after the warm-up; 0: up to train.steps.
    optimizer.decay_steps = _duration(0)
    optimizer.momentum = 0.0  # the momentum of sgd, rmsprop and lars
    optimizer.nesterov = False  # Nesterov's form of the momentum of sgd and lars
    optimizer.weight_decay = 0.0  # decoupled, as the argument of tf_keras optimizers
    # Variables without weight decay, as patterns of names such as ["*/bias", "*/gamma", "*/beta"].
    optimizer.weight_decay_exclude = []
    # Layers with another learning rate, or without updates until a step or at all, the first match
    # counts: [dict(variables="backbone/*", learning_rate_scale=0.1, frozen_until="1 epoch"),
    # dict(variables="stem/*", frozen=True)].
    optimizer.groups = []
    # Evaluate and export the exponential moving average of the weights, with this decay, such as 0.999;
    # 0: off. See docs/optimizers.md.
    optimizer.ema_decay = 0.0
    # Split the optimizer's slot variables over the replicas, with the same bits; see docs/memory.md.
    optimizer.shard_state = False
    # The number of micro-batches in a per-replica batch; the update does not depend on it.
    optimizer.gradient_accumulation_steps = 1
    optimizer.clip = clip = config_dict.ConfigDict()  # of the reduced gradients; set at most one
    clip.global_norm = 0.0  # scale all gradients to at most this joint norm
    clip.norm = 0.0  # scale each gradient to at most this norm
    clip.value = 0.0  # clip each element to [-value, value]

    config.train = train = config_dict.ConfigDict()
    # The total number of steps (global batches), or a duration: "90 epochs", "5000000 examples". The
    # other keys that accept a duration are listed in docs/running.md; checkpoint_interval,
    # summary_interval and eval.interval also accept a time, such as "30 minutes".
    train.steps = _duration(1000)
    train.max_duration = ""  # end training earlier, after a time such as "8 hours"; "": no limit
    # Steps of an inner loop, after which the host logs and may save.
    train.steps_per_loop = _duration(100)
    # After a step whose loss or gradients are not finite: stop (the run ends after the inner loop
    # without saving), skip (the update is not applied), rollback (the run restores its last checkpoint
    # and continues without that batch), ignore (no check).
    train.on_non_finite = "stop"
    train.rollback_limit = 10  # the run fails at the next rollback after this many
    # Treat a loss of more than this many times the median of the last 101 losses in the same way; 0: do
    # not check.
    train.loss_spike = 0.0
    # Log the global norms of the gradients (before clipping), the parameters and the updates.
    train.norms = False
    train.layer_norms = False  # write (but do not print) the norms of each variable as well
    train.gradient_shares = False  # log the shares of zero and non-finite elements of the gradients
    # Keep the checkpoints of the best evaluations in best/, apart from the others.
    train.best = best = config_dict.ConfigDict()
    best.metric = ""  # such as eval/accuracy; "": off
    best.mode = ""  # max if higher values of the metric are better, min if lower ones are
    best.keep = 1  # the number of checkpoints
    # Export the "best" or the "last" checkpoint to export/ at the end; "": do not.
    train.export = ""
    train.export_average = True  # export the averaged weights, if optimizer.ema_decay is set
    # End training when a metric has stopped improving.
    train.early_stopping = stopping = config_dict.ConfigDict()
    stopping.metric = ""  # such as eval/loss; "": off
    stopping.mode = ""  # max if higher values of the metric are better, min if lower ones are
    stopping.patience = 3  # evaluations in a row without an improvement
    stopping.min_delta = 0.0  # an improvement is a change by more than this
    stopping.restore_best = False  # the run's result is the best checkpoint, not the last step
    # The steps to profile, as FIRST:END without END, such as "200:210"; "": none. A SIGUSR1 profiles the
    # next inner loop.
    train.profile = ""
    # Steps between two writes of the trainer's own tf.summary calls in a step; 0: steps_per_loop.
    train.summary_interval = _duration(0)
    train.summary_seconds = 0.0  # write them instead after this many seconds; 0: after steps
    train.checkpoint_interval = _duration(1000)  # steps; 0: save only at the end
    train.checkpoint_seconds = 0.0  # also save after this many seconds; 0: only after steps
    train.checkpoints_to_keep = 3  # the newest ones
    train.checkpoint_keep_every = _duration(0)  # also keep those of its multiples; 0: none
    # background: copy the values and continue while a thread writes them (one process only);
    # blocking: wait until they are written; auto: background if possible.
    train.checkpoint_writing = "auto"
    # gce: also ask Google Cloud whether this machine will be preempted; none: only react to SIGTERM.
    train.preemption_notice = "none"
    # Print a line and the stacks of all threads after this many seconds without a step; 0: never.
    train.stall_seconds = 300.0

    config.summaries = summaries = config_dict.ConfigDict()  # see docs/observing.md
    # Where the logged values go: tensorboard, jsonl (metrics.jsonl), csv (metrics.csv), mlflow, wandb,
    # or path/to/file.py:Class or package.module:Class.
    summaries.writers = ["tensorboard", "jsonl"]
    # Steps between two histograms of the weights and of the gradients in TensorBoard; 0: none.
    summaries.histogram_interval = 0
    summaries.graph = False  # write the graph of the inner loop to TensorBoard

    # Actions at the end of inner loops and evaluations, each a name or a dict(name=..., **arguments):
    # early_stopping, path/to/file.py:Class or package.module:Class; see docs/actions.md.
    config.actions = []

    config.eval = evaluation = config_dict.ConfigDict()
    evaluation.interval = _duration(0)  # steps between evaluations; 0: evaluate only at the end
    evaluation.seconds = 0.0  # also evaluate after this many seconds; 0: only after steps
    evaluation.global_batch_size = 0  # examples per batch; 0: the global batch size of training
    # The splits that build_dataset is asked for; [] for an experiment without evaluation data. The
    # metrics of several splits have names such as eval/test/accuracy. ctl.data.idx and
    # ctl.data.tfrecords have only the splits "train" and "eval".
    evaluation.splits = ["eval"]
    evaluation.before_training = False  # also evaluate at step 0
    # MiB of the memory of the host that the values of the trainer's collect_outputs may use.
    evaluation.collect_limit_mib = 1024.0
    return config
