//! The tensors of a model, found by name, whatever files they lie in.

use crate::map::Map;
use crate::{DType, Error, View};

/// Where one tensor lies. The range was checked against its file when the entry was made.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) name: Box<str>,
    pub(crate) dtype: DType,
    /// Slowest dimension first.
    pub(crate) shape: Box<[usize]>,
    /// Which of the model's files.
    pub(crate) file: u32,
    /// Offset in that file.
    pub(crate) begin: usize,
    /// Size in bytes.
    pub(crate) len: usize,
}

/// All tensors of a model in file order.
#[derive(Debug)]
pub(crate) struct Table {
    entries: Vec<Entry>,
    /// Positions in `entries`, ordered by name: names are stored once.
    by_name: Vec<usize>,
}

impl Table {
    /// Takes tensors with distinct names that share no byte.
    pub(crate) fn new(entries: Vec<Entry>) -> Result<Table, Error> {
        let mut order: Vec<usize> = (0..entries.len()).collect();
        let entry = |&position: &usize| &entries[position];

        order.sort_unstable_by_key(|position| (entry(position).file, entry(position).begin));
        let mut occupied = order.iter().map(entry).filter(|entry| entry.len > 0);
        if let Some(mut last) = occupied.next() {
            for next in occupied {
                if next.file == last.file && next.begin < last.begin + last.len {
                    return Err(Error::Overlap {
                        first: last.name.to_string(),
                        second: next.name.to_string(),
                        end: last.begin + last.len,
                        begin: next.begin,
                    });
                }
                last = next;
            }
        }

        order.sort_unstable_by_key(|position| &*entry(position).name);
        if let Some(pair) = order.windows(2).find(|pair| entry(&pair[0]).name == entry(&pair[1]).name) {
            return Err(Error::DuplicateTensor { tensor: entry(&pair[0]).name.to_string() });
        }
        Ok(Table { entries, by_name: order })
    }

    /// Takes more of them.
    pub(crate) fn add(&mut self, more: Vec<Entry>) -> Result<(), Error> {
        let mut entries = std::mem::take(&mut self.entries);
        entries.extend(more);
        *self = Table::new(entries)?;
        Ok(())
    }

    pub(crate) fn find(&self, name: &str) -> Option<&Entry> {
        let at = self.by_name.binary_search_by_key(&name, |&position| &*self.entries[position].name).ok()?;
        Some(&self.entries[self.by_name[at]])
    }

    pub(crate) fn view<'a>(&'a self, name: &str, files: &'a [Map]) -> Option<View<'a>> {
        self.find(name).map(|entry| entry.view(files))
    }

    pub(crate) fn views<'a>(&'a self, files: &'a [Map]) -> impl Iterator<Item = View<'a>> {
        self.entries.iter().map(|entry| entry.view(files))
    }

    /// Bytes of all tensors together.
    pub(crate) fn bytes(&self) -> u64 {
        self.entries.iter().map(|entry| entry.len as u64).sum()
    }
}

impl Entry {
    fn view<'a>(&'a self, files: &'a [Map]) -> View<'a> {
        let map = &files[self.file as usize];
        let bytes = &map[self.begin..self.begin + self.len];
        View::mapped(&self.name, self.dtype, self.shape.to_vec(), bytes, map)
    }
}
