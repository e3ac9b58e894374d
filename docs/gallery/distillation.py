# %% [markdown]
# # Knowledge distillation
#
# A small student learns from labels, part of which are wrong, and from the softened answers of a larger teacher. The
# teacher is an attribute of the trainer; only the student is `self.model`, so only the student is trained.

# %%
from looptape import Trainer  # first: TensorFlow then starts without its log lines

import keras
import numpy as np
import tensorflow as tf

STEPS = 1000
BATCH = 64
TEACHER_UNITS = 128
STUDENT_UNITS = 6
TEMPERATURE = 4.0
keras.utils.set_random_seed(0)


def spirals(count, seed, wrong=0.0):
    """Points [count, 2] on three spiral arms, and the number of the arm; a share `wrong` has a random one."""
    random = np.random.default_rng(seed)
    arm, radius = random.integers(0, 3, count), random.uniform(0.1, 1, count)
    angle = 4 * radius + 2 * np.pi * arm / 3 + 0.1 * random.normal(size=count)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).astype("float32")
    return points, np.where(random.random(count) < wrong, random.integers(0, 3, count), arm)


def make_data(count=4096, wrong=0.6):
    return tf.data.Dataset.from_tensor_slices(spirals(count, 0, wrong)).shuffle(count, seed=1).batch(BATCH).repeat()


test = spirals(2000, 1)


# %%
def make_model(units=STUDENT_UNITS):
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(units, "relu") for _ in range(2)]
    return keras.Sequential([keras.Input((2,)), *hidden, keras.layers.Dense(3)])


class Distiller(Trainer):
    def __init__(self, student, optimizer, teacher, temperature, **options):
        super().__init__(student, optimizer, **options)
        self.teacher, self.temperature = teacher, temperature

    def compute_losses(self, batch, training):
        points, labels = batch
        answer = self.model(points, training=training)
        advice = tf.nn.softmax(self.teacher(points, training=False) / self.temperature)
        self.update_metrics(labels, answer)
        return {
            "labels": tf.nn.sparse_softmax_cross_entropy_with_logits(labels, answer),
            "teacher": tf.nn.softmax_cross_entropy_with_logits(advice, answer / self.temperature),
        }


# %% [markdown]
# The teacher needs no class of its own, and neither does the student that learns from the labels alone.

# %%
loss = {"labels": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
teacher = make_model(TEACHER_UNITS)
for name, model in {"teacher": teacher, "student alone": make_model()}.items():
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    plain = Trainer(model, keras.optimizers.Adam(3e-3), loss, metrics={"accuracy": accuracy})
    plain.fit(make_data(), steps=STEPS, progress=False)
    print(name, plain.evaluate(test)["accuracy"])

# %%
data = make_data()
trainer = Distiller(
    make_model(),
    keras.optimizers.Adam(3e-3),
    teacher,
    TEMPERATURE,
    loss_weights={"labels": 0.1, "teacher": TEMPERATURE**2},
    metrics={"accuracy": keras.metrics.SparseCategoricalAccuracy()},
)
trainer.fit(data, steps=STEPS, progress=False)
print("student with its teacher", trainer.evaluate(test)["accuracy"])
