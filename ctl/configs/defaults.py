"""Every key of an experiment's config, with its default. Loads no TensorFlow."""

from ml_collections import config_dict

# What may differ when a run is resumed without changing an update: by the promise, the hardware,
# the number of micro-batches, and everything that only watches.
HARMLESS = (
    "runtime.strategy",
    "runtime.logical_devices",
    "runtime.devices",
    "runtime.all_reduce.algorithm",
    "runtime.all_reduce.packs",
    "runtime.all_reduce.timeout",
    "runtime.cluster.",
    "runtime.xla",
    "runtime.deterministic",
    "runtime.gpu.",
    "runtime.tpu.",
    "data.placement",
    "data.prefetch",
    "data.tfrecord.parallel_calls",
    "optimizer.gradient_accumulation_steps",
    "train.",
    "eval.",
)


def defaults() -> config_dict.ConfigDict:
    """A config with every key at its default, unlocked."""
    config = config_dict.ConfigDict()

    # What to train: path/to/file.py:Class (relative to the config's folder or the current one) or
    # package.module:Class, a subclass of ctl.StandardTrainer.
    config.trainer = ""
    # Initial weights, the order of the data and dropout are functions of it.
    config.seed = 0

    config.init = init = config_dict.ConfigDict()
    # Begin with the weights of another run: its workdir, its folder of checkpoints (the newest is
    # taken), or one of them, such as runs/a/checkpoints/ckpt-500; "": with new ones.
    init.checkpoint = ""
    # Which variables to take, by patterns of names such as ["conv*/*", "dense/kernel"]; empty: all.
    init.variables = []

    config.runtime = runtime = config_dict.ConfigDict()
    # auto, default, one_device, mirrored, central_storage,
    # multi_worker_mirrored, parameter_server: docs/hardware.md
    runtime.strategy = "auto"
    # Which devices to take, such as ["GPU:0", "GPU:2"]; empty: all (one_device: the first).
    runtime.devices = []
    # Split the first GPU, or the CPU where there is none, into so many; 0: as the machine has them.
    runtime.logical_devices = 0
    runtime.gpu = gpu = config_dict.ConfigDict()  # TensorFlow takes nearly all memory by default
    gpu.memory_growth = False  # take memory as it is needed
    gpu.memory_limit_mib = 0  # take so much of each GPU and no more; 0: no limit
    runtime.tpu = tpu = config_dict.ConfigDict()  # with strategy tpu or auto; "": this machine's
    tpu.name = ""  # a TPU of Google Cloud, by its name
    tpu.zone = ""  # where it is; "": where this machine is
    tpu.project = ""  # whose it is; "": whose this machine is
    tpu.address = ""  # or a TPU by its worker's address, grpc://HOST:PORT
    runtime.precision = "float32"  # float32, float64, bfloat16, float16 (the last two are mixed)
    runtime.loss_scale = 0.0  # of float16: a fixed one; 0: dynamic
    # What XLA compiles: off, loop (many whole steps; one replica), step (a whole step; one replica),
    # gradients (forward and backward), autocluster (what TensorFlow finds), auto (the fastest that
    # is right here).
    runtime.xla = "auto"
    # The gradient is the sum in a fixed order of so many shards': the same bits on any number of
    # replicas that divides it, for so many times the bytes of the reduction. 0: off.
    runtime.logical_shards = 0
    runtime.all_reduce = all_reduce = config_dict.ConfigDict()
    all_reduce.dtype = ""  # bfloat16 halves the bytes that gradients travel in
    # auto, nccl (GPUs), hierarchical_copy (GPUs of one machine), one_device, ring (several processes)
    all_reduce.algorithm = "auto"
    all_reduce.packs = 1  # parts that nccl and hierarchical_copy cut a reduction in
    all_reduce.timeout = 0.0  # seconds that processes wait for each other in one; 0: for ever
    runtime.cluster = cluster = config_dict.ConfigDict()  # of several processes (TF_CONFIG)
    cluster.start_timeout = 600.0  # seconds to wait for all of them to start
    # Parameter servers hold a variable in parts of at least so many MiB, one a server; 0: whole.
    cluster.shard_mib = 0.0
    runtime.deterministic = False  # TensorFlow's op determinism: bit-identical on GPUs too, slower

    config.data = data = config_dict.ConfigDict()
    data.dir = ""  # where build_dataset finds its files, as self.options.data.dir
    # Examples an update is computed from: set exactly one of the two.
    data.global_batch_size = 0
    data.per_replica_batch_size = 0
    # stream, or device: hold arrays in the device's memory, so that only indexes travel (xla=loop).
    data.placement = "stream"
    data.prefetch = -1  # batches to prepare ahead; -1: tf.data chooses
    data.tfrecord = tfrecord = config_dict.ConfigDict()  # for ctl.data.tfrecords
    tfrecord.interleave = 4  # files read at once
    tfrecord.parallel_calls = -1  # records parsed at once; -1: tf.data chooses
    tfrecord.cache = False  # keep parsed examples in memory
    tfrecord.shuffle_buffer = 10_000  # examples mixed at a time in training; 0: none

    # The keys that the experiment's own build_model reads, as self.options.model.
    config.model = config_dict.ConfigDict()

    config.optimizer = optimizer = config_dict.ConfigDict()
    optimizer.name = "adam"  # adam, adamw, sgd, rmsprop, adagrad, lion
    optimizer.learning_rate = 1e-3
    # If set, learning_rate is for this global batch and grows linearly with the real one
    # (Goyal et al. 2017, "Accurate, large minibatch SGD").
    optimizer.learning_rate_batch_size = 0
    optimizer.schedule = "constant"  # constant, cosine
    optimizer.warmup_steps = 0  # updates of linear growth from 0, before the cosine
    optimizer.decay_steps = 0  # updates of the cosine, after the warm-up; 0: all of train.steps
    optimizer.momentum = 0.0  # sgd, rmsprop
    optimizer.nesterov = False  # sgd with momentum
    optimizer.weight_decay = 0.0  # decoupled, as tf_keras' weight_decay
    optimizer.gradient_accumulation_steps = 1  # micro-batches a replica's share is computed in
    optimizer.clip = clip = config_dict.ConfigDict()  # of the reduced gradients; at most one
    clip.global_norm = 0.0
    clip.norm = 0.0
    clip.value = 0.0

    config.train = train = config_dict.ConfigDict()
    train.steps = 1000  # global steps (batches) in all
    train.steps_per_loop = 100  # steps between two looks of the host
    # Where a step's loss or gradients are not finite: stop (the run ends with the loop, and saves
    # nothing of it), skip (the update is left out, and the run goes on), rollback (the run goes back
    # to its last checkpoint, and on without that batch), ignore (nobody looks).
    train.on_non_finite = "stop"
    train.rollback_limit = 10  # rollbacks after which a run stops
    # Treat so, too, a loss of more than so many times the median of the last 101 steps'; 0: none.
    train.loss_spike = 0.0
    # Show and record the global norms of gradients (before clipping), parameters and updates.
    train.norms = False
    train.checkpoint_interval = 1000  # steps; 0: at the end only
    train.checkpoint_seconds = 0.0  # save as well where so much time has passed; 0: by steps only
    train.checkpoints_to_keep = 3
    train.checkpoint_keep_every = 0  # keep those at multiples of so many steps too; 0: none
    # background: copy the values and train on while a thread writes them (one process); blocking:
    # wait; auto: background where it can be.
    train.checkpoint_writing = "auto"
    # gce: ask Google Cloud, too, whether this machine is about to go; none: SIGTERM tells.
    train.preemption_notice = "none"
    # Seconds without a step after which a line and all threads' stacks are printed; 0: never.
    train.stall_seconds = 300.0

    config.eval = evaluation = config_dict.ConfigDict()
    evaluation.interval = 0  # steps; 0: at the end only
    evaluation.global_batch_size = 0  # 0: that of training
    return config
