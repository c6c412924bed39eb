// aedes on 127.0.0.1: node aedes_broker.mjs FOLDER PORT, where FOLDER has node_modules/aedes.
import { createServer } from 'node:net'
import { pathToFileURL } from 'node:url'

const [folder, port] = process.argv.slice(2)
const { Aedes } = await import(pathToFileURL(`${folder}/node_modules/aedes/aedes.js`))
const aedes = await Aedes.createBroker()
createServer(aedes.handle).listen(Number(port), '127.0.0.1')
