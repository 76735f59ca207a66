// The page: it trains step by step, draws, and feeds an infinite pixel when asked to.
import { Chart, count } from "./chart.js";
import { Digits } from "./digits.js";
import { fetchDescription, Training } from "./training.js";

const SHOWN = 16; // held-out digits with a picture
const PREDICT_EVERY = 10; // steps

const at = (id) => document.getElementById(id);

class Page {
  constructor(description, training) {
    this.training = training;
    this.size = description.batch;
    this.rate = description.learningRate;
    this.train = new Digits(description.tensors, "train");
    this.heldOut = new Digits(description.tensors, "test");
    this.losses = new Chart(at("loss-chart"), { base: 10, stairs: false, lowest: 0.1, highest: 1 });
    this.scales = new Chart(at("scale-chart"), { base: 2, stairs: true, lowest: 512, highest: 4096 });
    this.pictures = Array.from({ length: SHOWN }, (_, row) => {
      const item = document.createElement("li");
      const canvas = item.appendChild(document.createElement("canvas"));
      this.heldOut.draw(canvas, row);
      item.appendChild(document.createElement("span"));
      return at("digits").appendChild(item);
    });
    this.running = false;
    this.work = Promise.resolve();
    at("run").onclick = () => (this.running ? this.pause() : this.start());
    at("overflow").onclick = () => this.feedInfinity();
    at("reset").onclick = () => this.reset();
  }

  async reset() {
    await this.pause();
    this.training.reset();
    this.number = this.skipped = 0;
    this.infinite = false;
    this.losses.clear();
    this.scales.clear();
    await this.predict();
    this.show({ loss: NaN });
    say("Press Train.");
  }

  start() {
    this.running = true;
    at("run").textContent = "Pause";
    say(`Each step trains on ${this.size} digits.`);
    this.queue(() => this.trainUntilPaused());
  }

  pause() {
    this.running = false;
    at("run").textContent = "Train";
    return this.work;
  }

  // Two steps at once would read one state: each piece of work waits for the one before.
  queue(job) {
    this.work = this.work.then(job).catch(fail);
    return this.work;
  }

  // As many steps as the chosen pace asks for, in time for each picture of the screen.
  async trainUntilPaused() {
    let due = 0, before = performance.now();
    while (this.running) {
      const now = await new Promise(requestAnimationFrame);
      due = Math.min(due + ((now - before) * Number(at("pace").value)) / 1000, 1000);
      before = now;
      let result;
      for (; due >= 1 && this.running && performance.now() - now < 12; due--) result = await this.step();
      if (due > 20) due = 0; // slower than asked
      if (result) this.show(result);
    }
  }

  // Train on one batch; the step after feedInfinity has an infinite pixel in it.
  async step() {
    const { images, labels } = this.train.batch(this.number * this.size, this.size);
    const scale = this.training.lossScale;
    if (this.infinite) images[27] = Infinity;
    this.infinite = false;
    const result = await this.training.step(images, labels, this.rate);
    this.number++;
    this.losses.add(result.loss, result.applied);
    this.scales.add(this.training.lossScale, result.applied);
    if (!result.applied) {
      this.skipped++;
      say(
        `Step ${count(this.number)} had a gradient that is not finite. It was skipped: the weights and the momentum kept ` +
          `their values, and the loss scale fell from ${count(scale)} to ${count(this.training.lossScale)}.`,
      );
    } else if (this.training.lossScale > scale) {
      say(
        `Step ${count(this.number)}: the gradients of many steps were finite, and the loss scale grew from ` +
          `${count(scale)} to ${count(this.training.lossScale)}.`,
      );
    }
    if (this.number % PREDICT_EVERY === 0) await this.predict();
    return result;
  }

  async feedInfinity() {
    this.infinite = true;
    if (!this.running) await this.queue(async () => this.show(await this.step()));
  }

  async predict() {
    const { images, labels } = this.heldOut.batch(0, this.heldOut.count);
    const predicted = await this.training.predict(images);
    const right = predicted.filter((digit, row) => digit === Number(labels[row])).length;
    at("accuracy").textContent = `${((100 * right) / predicted.length).toFixed(1)} %`;
    this.pictures.forEach((item, row) => {
      item.lastChild.textContent = predicted[row];
      item.className = predicted[row] === Number(labels[row]) ? "right" : "wrong";
    });
  }

  show({ loss }) {
    at("step").textContent = count(this.number);
    at("loss").textContent = Number.isFinite(loss) ? loss.toPrecision(3) : this.number ? "not finite" : "–";
    at("scale").textContent = count(this.training.lossScale);
    at("skipped").textContent = count(this.skipped);
    at("skipped").parentElement.classList.toggle("some", this.skipped > 0);
    this.losses.draw();
    this.scales.draw();
  }
}

function say(message) {
  at("news").textContent = message;
}

function fail(error) {
  at("news").className = "error";
  say(`This page cannot train here: ${error.message ?? error}`);
  throw error;
}

try {
  const description = await fetchDescription();
  const page = new Page(description, await Training.load(description));
  await page.reset();
  for (const id of ["run", "overflow", "reset"]) at(id).disabled = false;
  window.page = page; // for the console
} catch (error) {
  fail(error);
}
