// A training step in ONNX Runtime Web, and the values that it carries from one call to the next.
import * as ort from "./ort.wasm.min.mjs";

ort.env.wasm.numThreads = 1; // more threads need HTTP headers that static servers do not send

const ARRAYS = { float32: Float32Array, int64: BigInt64Array, uint8: Uint8Array };

// Fetch step.json and its tensors: { pairs, batch, learningRate, tensors: { NAME: { type, dims, data } } }.
export async function fetchDescription() {
  const [description, buffer] = await Promise.all([
    fetchFile("step.json").then((file) => file.json()),
    fetchFile("tensors.bin").then((file) => file.arrayBuffer()),
  ]);
  const tensors = {};
  for (const { name, type, dims, offset } of description.tensors) {
    const count = dims.reduce((product, size) => product * size, 1);
    tensors[name] = { type, dims, data: new ARRAYS[type](buffer, offset, count) };
  }
  return { ...description, tensors };
}

async function fetchFile(name) {
  const file = await fetch(name);
  if (!file.ok) throw new Error(`${name}: ${file.status} ${file.statusText}`);
  return file;
}

export class Training {
  static async load(description) {
    return new Training(await ort.InferenceSession.create("step.onnx"), description);
  }

  constructor(session, { pairs, tensors }) {
    this.session = session;
    this.pairs = pairs;
    this.first = Object.fromEntries(Object.keys(pairs).map((name) => [name, tensors[`state/${name}`]]));
    this.reset();
  }

  // Go back to the first values of weights, moments and loss scale.
  reset() {
    this.carried = {};
    for (const [name, { type, dims, data }] of Object.entries(this.first)) {
      this.carried[name] = new ort.Tensor(type, data.slice(), dims);
    }
  }

  get lossScale() {
    return this.carried.current_loss_scale.data[0];
  }

  // Run one step on images (float32 [N, 64]) and labels (int64 [N]).
  async step(images, labels, learningRate) {
    const results = await this.session.run({ ...this.feeds(images, labels, learningRate), ...this.carried });
    for (const [input, output] of Object.entries(this.pairs)) this.carried[input] = results[output];
    return { loss: results.loss.data[0], applied: Boolean(results.all_finite.data[0]) };
  }

  // Predict the digits of images with the present weights; nothing is trained.
  async predict(images) {
    const count = images.length / 64;
    const feeds = this.feeds(images, new BigInt64Array(count), 0);
    const { logits } = await this.session.run({ ...feeds, ...this.carried }, ["logits"]);
    return Array.from({ length: count }, (_, row) => indexOfLargest(logits.data.subarray(10 * row, 10 * row + 10)));
  }

  feeds(images, labels, learningRate) {
    return {
      images: new ort.Tensor("float32", images, [labels.length, 64]),
      labels: new ort.Tensor("int64", labels, [labels.length]),
      learning_rate: new ort.Tensor("float32", [learningRate], []),
    };
  }
}

function indexOfLargest(values) {
  let best = 0;
  for (let index = 1; index < values.length; index++) if (values[index] > values[best]) best = index;
  return best;
}
