import assert from 'node:assert/strict';
import test from 'node:test';
import { decode } from '../../../viewer/static/js/safetensors.js';

function encode(header, body) {
  let text = JSON.stringify(header);
  text += ' '.repeat((8 - (text.length % 8)) % 8);
  const out = new Uint8Array(8 + text.length + body.length);
  new DataView(out.buffer).setBigUint64(0, BigInt(text.length), true);
  out.set(new TextEncoder().encode(text), 8);
  out.set(body, 8 + text.length);
  return out.buffer;
}

test('arrays are views of the answer', () => {
  const body = new Uint8Array(new Float32Array([1.5, NaN]).buffer);
  const buffer = encode(
    { __metadata__: { start: '3' }, x: { dtype: 'F32', shape: [2], data_offsets: [0, 8] }, none: { dtype: 'U8', shape: [0], data_offsets: [8, 8] } },
    body,
  );
  const { arrays, metadata } = decode(buffer);
  assert.deepEqual([...arrays.x], [1.5, NaN]);
  assert.equal(arrays.x.buffer, buffer);
  assert.equal(arrays.none.length, 0);
  assert.equal(metadata.start, '3');
});

test('a cut or strange answer is refused', () => {
  const header = { x: { dtype: 'F32', shape: [2], data_offsets: [0, 8] } };
  assert.throws(() => decode(encode(header, new Uint8Array(4))), /cut off/);
  assert.throws(() => decode(encode({ x: { ...header.x, dtype: 'F8' } }, new Uint8Array(8))), /dtype F8/);
  const long = encode(header, new Uint8Array(8));
  new DataView(long).setBigUint64(0, 1n << 40n, true);
  assert.throws(() => decode(long), /header is cut off/);
});
