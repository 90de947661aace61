import assert from 'node:assert/strict';
import test from 'node:test';
import { tokenText, visible } from '../../../viewer/static/js/text.js';

const bytes = (text) => new TextEncoder().encode(text);

test('plain text stays what it is', () => {
  assert.deepEqual(tokenText(bytes(' the')), { text: ' the', flow: ' the', split: false });
  assert.equal(tokenText(bytes('caf\u00e9')).text, 'caf\u00e9');
  assert.equal(tokenText(bytes('\u{1f600}')).text, '\u{1f600}');
});

test('part of a character is shown as bytes', () => {
  assert.deepEqual(tokenText([0xf0, 0x9f]), { text: '\\xf0\\x9f', flow: '\\xf0\\x9f', split: true });
  assert.equal(tokenText([0x20, 0xe2, 0x80]).text, ' \\xe2\\x80');
});

test('a line end is seen and breaks the line, also inside a token', () => {
  assert.deepEqual(tokenText(bytes('.\n')), { text: '.\u23ce', flow: '.\u23ce\n', split: false });
  assert.equal(tokenText(bytes(':\n    ')).flow, ':\u23ce\n    ');
  assert.equal(tokenText(bytes('\u23ce')).flow, '\\u{23ce}', 'the sign itself is not a line end');
  assert.equal(tokenText(bytes('\ta')).text, '\u21e5a');
});

test('what the eye cannot see is spelled out', () => {
  assert.equal(visible('\u202eabc'), '\\u{202e}abc');
  assert.equal(visible('a\u200bb'), 'a\\u{200b}b');
  assert.equal(visible('\u0000\u001b[31m'), '\\u{0}\\u{1b}[31m');
  assert.equal(visible('\u00a0'), '\\u{a0}');
  assert.equal(visible('\ufeff'), '\\u{feff}');
  assert.equal(visible('  '), '\u00b7\u00b7');
});

test('a byte order mark is not swallowed', () => {
  assert.equal(tokenText([0xef, 0xbb, 0xbf, 0x61]).text, '\\u{feff}a');
});

test('a lone accent does not join its neighbour', () => {
  assert.equal(visible('\u0301'), '\u25cc\u0301');
});

test('markup is only text', () => {
  assert.equal(tokenText(bytes('<script>')).text, '<script>');
});

test('no bytes are no text', () => {
  assert.equal(tokenText([]).text, '');
});
