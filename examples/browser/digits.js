// The digits: pictures of 8 x 8 pixels from 0 to 16, in batches, and on a canvas.
const PIXELS = 64;

export class Digits {
  constructor(tensors, part) {
    this.pixels = tensors[`${part}/images`].data;
    this.numbers = tensors[`${part}/labels`].data;
  }

  get count() {
    return this.numbers.length;
  }

  // Return `size` digits from the row `start` on, going round at the end.
  batch(start, size) {
    const images = new Float32Array(size * PIXELS);
    const labels = new BigInt64Array(size);
    for (let place = 0; place < size; place++) {
      const row = (start + place) % this.count;
      for (let pixel = 0; pixel < PIXELS; pixel++) {
        images[place * PIXELS + pixel] = this.pixels[row * PIXELS + pixel] / 16;
      }
      labels[place] = BigInt(this.numbers[row]);
    }
    return { images, labels };
  }

  draw(canvas, row) {
    canvas.width = canvas.height = 8;
    const context = canvas.getContext("2d");
    const picture = context.createImageData(8, 8);
    for (let pixel = 0; pixel < PIXELS; pixel++) {
      picture.data[4 * pixel + 3] = Math.min(255, 16 * this.pixels[row * PIXELS + pixel]);
    }
    context.putImageData(picture, 0, 0);
  }
}
