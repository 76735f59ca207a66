// Train a scaled step on onnxruntime-node: node train.js FOLDER
//
// FOLDER is made by `python -m examples.prepare FOLDER`. The trained state is written to FOLDER/trained.

import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import ort from "onnxruntime-node";

const folder = process.argv[2];
if (!folder) {
  console.error("usage: node train.js FOLDER");
  process.exit(1);
}

// host.onnx lists all carried inputs among its inputs: onnxruntime-node ignores feeds of inputs with an initializer.
const { state, first } = JSON.parse(readFileSync(join(folder, "host.json")));
const session = await ort.InferenceSession.create(join(folder, "host.onnx"), { logSeverityLevel: 3 });

const arrays = { float32: Float32Array, int64: BigInt64Array };

function read(path, type) {
  const bytes = readFileSync(path);
  return new arrays[type](bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength));
}

let carried = {};
for (const input of session.inputMetadata) {
  const { name, type, shape } = input;
  if (!(name in state)) continue; // a part of the batch
  const data = first[name]?.data.map(type === "int64" ? BigInt : Number);
  const values = data ? arrays[type].from(data) : read(join(folder, "start", `${name}.bin`), type);
  carried[name] = new ort.Tensor(type, values, shape);
}

const images = read(join(folder, "images.bin"), "float32");
const labels = read(join(folder, "labels.bin"), "int64");
const batch = 64;
const pixels = 64;
const rate = new ort.Tensor("float32", Float32Array.of(0.005), []);
for (let step = 1; step <= labels.length / batch; step++) {
  const rows = [(step - 1) * batch, step * batch];
  const results = await session.run({
    images: new ort.Tensor("float32", images.slice(rows[0] * pixels, rows[1] * pixels), [batch, pixels]),
    labels: new ort.Tensor("int64", labels.slice(...rows), [batch]),
    learning_rate: rate,
    ...carried,
  });
  carried = Object.fromEntries(Object.entries(state).map(([input, output]) => [input, results[output]]));
  const applied = Boolean(results.all_finite.data[0]);
  if (step % 10 === 0 || !applied) {
    const scale = carried.current_loss_scale.data[0];
    const loss = Number(results.loss.data[0].toPrecision(6));
    console.log(`step ${step}  loss ${loss}  loss scale ${scale}${applied ? "" : "  skipped"}`);
  }
}

mkdirSync(join(folder, "trained"), { recursive: true });
for (const [name, { data }] of Object.entries(carried)) {
  writeFileSync(join(folder, "trained", `${name}.bin`), new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
}
