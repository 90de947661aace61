// Reads safetensors bytes: typed-array views, nothing is copied.

const TYPES = {
  U8: Uint8Array,
  U16: Uint16Array,
  U32: Uint32Array,
  I32: Int32Array,
  I64: BigInt64Array,
  F32: Float32Array,
};

/**
 * @param {ArrayBuffer} buffer
 * @returns {{arrays: Object<string, ArrayLike<number>>, metadata: Object<string, string>}}
 */
export function decode(buffer) {
  const view = new DataView(buffer);
  const size = Number(view.getBigUint64(0, true));
  if (size > buffer.byteLength - 8) throw new Error('safetensors: the header is cut off');
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, size)));
  const arrays = {};
  for (const [name, entry] of Object.entries(header)) {
    if (name === '__metadata__') continue;
    const Type = TYPES[entry.dtype];
    if (!Type) throw new Error(`safetensors: ${name} has dtype ${entry.dtype}`);
    const [begin, end] = entry.data_offsets;
    if (8 + size + end > buffer.byteLength) throw new Error(`safetensors: ${name} is cut off`);
    arrays[name] = new Type(buffer, 8 + size + begin, (end - begin) / Type.BYTES_PER_ELEMENT);
  }
  return { arrays, metadata: header.__metadata__ || {} };
}
