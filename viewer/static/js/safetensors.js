// Safetensors bytes: read as typed-array views, nothing is copied; written in an exported folder.

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

/**
 * @param {Object<string, ArrayLike<number>>} arrays typed arrays
 * @param {Object<string, string>} metadata
 * @returns {Blob}
 */
export function encode(arrays, metadata) {
  const names = Object.keys(arrays).sort((x, y) => arrays[y].BYTES_PER_ELEMENT - arrays[x].BYTES_PER_ELEMENT);
  const header = { __metadata__: metadata };
  let end = 0;
  for (const name of names) {
    const array = arrays[name];
    const [dtype] = Object.entries(TYPES).find(([, Type]) => array instanceof Type);
    header[name] = { dtype, shape: [array.length], data_offsets: [end, end += array.byteLength] };
  }
  const text = new TextEncoder().encode(JSON.stringify(header));
  const size = Math.ceil(text.length / 8) * 8;
  return new Blob([new BigUint64Array([BigInt(size)]), text, ' '.repeat(size - text.length), ...names.map((name) => arrays[name])]);
}
