"""Retrieval of items by two towers (Yi et al. 2019, "Sampling-bias-corrected neural modeling").

One tower computes the vector of a user, the other that of an item; their product is the score. Here the
towers are embeddings without further layers. The interactions are synthetic, so that the best possible
ranking is known: a user sees random items, and takes one of them with a probability that increases with
the product of two hidden factors. No ranking is better than the one by the hidden factors. All items are
about equally frequent, because their factors have the same length, so that the scores need no correction
for frequent items.
"""

import numpy as np
import tensorflow as tf
import tf_keras

import ctl

_FACTORS = 8  # the size of the hidden factors
_SEEN = 100  # items that a user sees before taking one of them
_SHARPNESS = 3.0
_TOP = 100  # items that are retrieved


class TwoTower(tf_keras.Model):
    """`users` and `items` compute the vectors of ids; the model returns both."""

    def __init__(self, *, users, items, width):
        super().__init__()
        self.users = tf_keras.layers.Embedding(users, width)
        self.items = tf_keras.layers.Embedding(items, width)

    def call(self, inputs):
        return self.users(inputs["user"]), self.items(inputs["item"])


class TwoTowerTrainer(ctl.StandardTrainer):
    """Learns to tell the item that a user takes from others, by a softmax over all of them.

    The others are the items of the other rows of the global batch, or, if `model.negatives` is not 0,
    that number of random items for each row.
    """

    def build_model(self):
        options = self.options.model
        return TwoTower(users=options.user_count, items=options.item_count, width=options.width)

    def build_dataset(self, split, input_context):
        options = self.options.model
        hidden = make_factors(options.user_count, options.item_count)
        training = split == "train"
        count = options.interactions if training else options.eval_interactions
        return ctl.data.arrays(draw_interactions(*hidden, count, seed=1 if training else 2))

    def per_example_loss(self, batch, outputs):
        user, item = outputs
        if self.options.model.negatives:
            others, scores = self.score_random_items(user)
        else:
            items, others = ctl.replica.all_gather((item, batch["item"]))
            scores = tf.matmul(user, items, transpose_b=True)  # [rows, all rows]
        # Another row may have the item of this one, or a random item may be it: neither is an error.
        same = tf.cast(others == batch["item"][:, tf.newaxis], scores.dtype)
        positive = tf.reduce_sum(user * item, axis=1, keepdims=True)
        every = tf.concat([positive, scores - 1e9 * same], axis=1)
        return tf.reduce_logsumexp(every, axis=1) - positive[:, 0]

    def score_random_items(self, user):
        """Draws items for each row; returns their numbers and scores, [rows, negatives] each."""
        options = self.options.model
        ids = ctl.random.integers(
            [None, options.negatives], 0, options.item_count, name="negatives"
        )
        return ids, tf.einsum("rd,rnd->rn", user, self.model.items(ids))

    def collect_outputs(self, batch, outputs):
        """Ranks the item of each row among all items: by the model, and by the hidden factors."""
        user, _ = outputs
        every = self.model.items(tf.range(self.options.model.item_count))
        true_users, true_items = make_factors(
            self.options.model.user_count, self.options.model.item_count
        )
        true_user = tf.gather(true_users, batch["user"])
        return {
            "rank": rank(user, every, batch["item"]),
            "best_rank": rank(true_user, tf.constant(true_items), batch["item"]),
        }

    def compute_metrics(self, collected):
        return {
            **retrieval_metrics(collected["rank"]),
            **{f"best_{k}": v for k, v in retrieval_metrics(collected["best_rank"]).items()},
        }


def rank(user, items, item):
    """The number of items [items, size] with a higher score than each row's own item, [rows]."""
    scores = tf.matmul(user, items, transpose_b=True)
    own = tf.gather(scores, item, batch_dims=1)
    return tf.reduce_sum(tf.cast(scores > own[:, tf.newaxis], tf.int32), axis=1)


def retrieval_metrics(ranks):
    """Recall and NDCG of the first `_TOP` items; each row has one relevant item."""
    hits = ranks < _TOP
    return {
        f"recall_at_{_TOP}": np.mean(hits),
        f"ndcg_at_{_TOP}": np.mean(hits / np.log2(ranks + 2.0)),  # rank 0 is the first
    }


def make_factors(users, items):
    """The hidden factors: [users, size] of normal numbers, and [items, size] of length 1."""
    draw = np.random.default_rng(0)
    item = draw.standard_normal([items, _FACTORS], np.float32)
    user = draw.standard_normal([users, _FACTORS], np.float32)
    return user, item / np.linalg.norm(item, axis=1, keepdims=True)


def draw_interactions(user_factors, item_factors, count, *, seed):
    """Draws `count` pairs of a user and the item that the user takes."""
    draw = np.random.default_rng(seed)
    users = draw.integers(len(user_factors), size=count, dtype=np.int32)
    taken = []
    for user in np.array_split(users, -(-count // 10_000)):  # which bounds the memory
        seen = draw.integers(len(item_factors), size=[len(user), _SEEN], dtype=np.int32)
        scores = np.einsum("ud,usd->us", user_factors[user], item_factors[seen])
        total = np.cumsum(np.exp(_SHARPNESS * scores), axis=1)
        choice = np.sum(total < draw.random([len(user), 1]) * total[:, -1:], axis=1)
        taken.append(seen[np.arange(len(user)), choice])
    return {"user": users, "item": np.concatenate(taken)}
