"""The same student with a `train_step` in a subclass of `keras.Model`."""

import keras
import tensorflow as tf


class Distiller(keras.Model):
    def __init__(self, student, teacher, temperature, labels_weight, teacher_weight):
        super().__init__()
        self.student, self.teacher, self.temperature = student, teacher, temperature
        self.labels_weight, self.teacher_weight = labels_weight, teacher_weight
        self.labels_tracker = keras.metrics.Mean(name="labels")
        self.teacher_tracker = keras.metrics.Mean(name="teacher")
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")

    @property
    def metrics(self):
        return [self.labels_tracker, self.teacher_tracker, self.accuracy]

    def losses_of(self, batch, training):
        points, labels = batch
        answer = self.student(points, training=training)
        advice = tf.nn.softmax(self.teacher(points, training=False) / self.temperature)
        of_labels = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, answer))
        of_teacher = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(advice, answer / self.temperature))
        self.labels_tracker.update_state(of_labels)
        self.teacher_tracker.update_state(of_teacher)
        self.accuracy.update_state(labels, answer)
        return self.labels_weight * of_labels + self.teacher_weight * of_teacher

    def train_step(self, batch):
        with tf.GradientTape() as tape:
            loss = self.losses_of(batch, training=True)
        variables = self.student.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, batch):
        self.losses_of(batch, training=False)
        return {metric.name: metric.result() for metric in self.metrics}


def compiled(script):
    model = Distiller(script.make_model(), script.teacher, script.TEMPERATURE, 0.1, script.TEMPERATURE**2)
    model.compile(keras.optimizers.Adam(3e-3))
    return model
